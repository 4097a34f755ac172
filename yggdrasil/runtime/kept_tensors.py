"""Tensors of a model whose weights were rounded, kept on disk: a later start reads these and nothing else of the model.

It needs neither transformers' models and configurations, which take longer to import than all the rest, nor the time to
round. The file is safetensors; its metadata says the rest. Of models that native steps do not cover nothing is kept:
their steps are traced at every start, from the model itself.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yggdrasil.artifacts import check_weights, current_machine
from yggdrasil.artifacts.fork import in_fork
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.outline import Outline
from yggdrasil.checkpoints.prepared import is_whole, prepare, prepared_root
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import ArtifactError
from yggdrasil.native import is_native
from yggdrasil.native.arena import Arena
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.native_steps.loading import description_of, load_described
from yggdrasil.runtime.room import give_back

_FILE = "tensors.safetensors"
_DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "U8": torch.uint8, "I8": torch.int8,
    "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What decides how tensors lie; a change makes those that were kept out of date.
_SOURCES = ("checkpoints/**/*.py", "runtime/loading.py", "runtime/kept_tensors.py", "native/**/*.[hc]*")


def open_model(
    source: str | Path | Source,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    *,
    weights: Weights = "full",
    is_described: bool = True,
) -> LoadedModel:
    """What ``load_model`` gives: of a described model from its file as it lies, unless ``is_described`` is false.

    Of one whose weights are rounded from tensors kept by an earlier time if they are whole; else it keeps them.

    Raises:
        YggdrasilError: as ``load_model``.
    """
    found = Source.find(source)
    if found.gguf is None:
        check_weights(found.folder)
    give_back()  # a tokenizer was read before, in twice its size

    def load() -> LoadedModel:
        from yggdrasil.runtime.loading import load_model  # brings transformers' models along

        return load_model(found, dtype, device, num_threads, weights=weights)

    if device.type != "cpu":
        return load()
    described = load_described(found, dtype, num_threads, weights, lambda: load().model) if is_described else None
    if described is not None:
        return described
    if not _is_kept(found, weights):
        return load()
    folder = _folder(found, dtype, weights)
    kept = _kept(folder)
    if kept is None:
        in_fork(lambda: str(_keep(load(), folder)))
        kept = _kept(folder)
    if kept is None:
        return load()
    tensors, record = kept
    outline = Outline.from_record(record["outline"])
    return LoadedModel(
        found.given, outline, num_threads, dtype, device, tensors, record["formats"],
        record["facts"], record["config"], lambda: load().model,
    )  # fmt: skip


def keep_model(loaded: LoadedModel, source: str | Path | Source, weights: Weights) -> None:
    """Have the next ``open_model`` find what is loaded already; where that cannot be it takes longer."""
    found = Source.find(source)
    if loaded.device.type != "cpu" or not _is_kept(found, weights):
        return
    folder = _folder(found, loaded.dtype, weights)
    if not is_whole(folder, _layout(), sampled=_FILE):
        _keep(loaded, folder)


def _is_kept(source: Source, weights: Weights) -> bool:
    """Whether native steps run over weights that take time to make."""
    return weights not in ("full", "file") and is_native() and description_of(source) is not None


def _folder(source: Source, dtype: torch.dtype, weights: Weights) -> Path:
    return prepared_root() / source.fingerprint() / f"packed-{str(dtype).removeprefix('torch.')}-{weights}"


def _kept(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What ``folder`` holds, if that is whole and of this layout."""
    if not is_whole(folder, _layout(), sampled=_FILE):
        return None
    try:
        return _read(folder / _FILE)
    except (OSError, ValueError, KeyError):  # a process of another version is putting its own there just now
        return None


def _keep(loaded: LoadedModel, folder: Path) -> Path:
    """Write what is loaded, where that can be done."""
    if _has_room(loaded) and all(tensor.dtype in _NAMES for tensor in loaded.tensors.values()):
        with suppress(ArtifactError):  # the next start takes as long as this one
            prepare(folder, _layout(), lambda partial: _write(loaded, partial / _FILE), sampled=_FILE)
    return folder


@cache
def _layout() -> str:
    """Digest of everything but the model that its tensors' layout depends on."""
    import transformers  # here: no described model needs it

    digest = hashlib.sha256()
    for part in (torch.__version__, transformers.__version__, current_machine().fingerprint, str(is_native())):
        digest.update(part.encode())
    for pattern in _SOURCES:
        for file in sorted(Path(__file__).parents[1].glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _has_room(loaded: LoadedModel) -> bool:
    """Whether the disk takes them and as much again."""
    folder = prepared_root()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free > 2 * sum(tensor.nbytes for tensor in loaded.tensors.values())


def _write(loaded: LoadedModel, file: Path) -> None:
    """Write the tensors in their order, never a second copy in memory."""
    record = {
        "config": loaded.described, "formats": loaded.formats, "facts": dict(loaded.config),
        "outline": asdict(loaded.outline),
        "layout": _layout(), "sums": _sums(loaded.tensors),
    }  # fmt: skip
    header: dict[str, Any] = {"__metadata__": {"record": json.dumps(record)}}
    end = 0
    for name, tensor in loaded.tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in loaded.tensors.values():
            stream.write(memoryview(_bytes_of(tensor.contiguous())))


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors, read to where steps read them, and what was noted beside them; None where they are damaged.

    None too where the file is of another layout: what was looked at may have been replaced before it was opened.
    """
    arena, tensors = Arena(), {}
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        record = json.loads(header.pop("__metadata__")["record"])
        if record["layout"] != _layout():
            return None
        for name, entry in header.items():
            shape = entry["shape"]
            tensors[name] = tensor = arena.zeros(shape or [1], _DTYPES[entry["dtype"]]).view(shape)
            stream.readinto(_bytes_of(tensor))
    return (tensors, record) if record["sums"] == _sums(tensors) else None


def _sums(tensors: Mapping[str, Tensor]) -> list[int]:
    """Of each tensor as words: no place changes alone without its sum, which costs what reading memory does."""
    sums = []
    for tensor in tensors.values():
        content = _bytes_of(tensor.contiguous())
        words = content[: content.size // 8 * 8].view("int64")
        sums.append(int(words.sum()) + int(content[words.nbytes :].sum()))
    return sums


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().view(-1).view(torch.uint8).numpy()
