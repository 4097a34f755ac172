"""Disk cache of the packed tensors of models that are quantised at load.

A start that reads the cache neither quantises nor imports transformers' models, the slowest part of a start. The file
is in safetensors format, with the model's sizes and formats in its metadata. Models that native steps do not cover are
not cached: their steps are traced from the transformers model at every start.
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
from yggdrasil.artifacts.memory import drop_reserved, trim_heap
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.gguf.packing import drop_begun
from yggdrasil.checkpoints.model_sizes import ModelSizes
from yggdrasil.checkpoints.prepared import is_whole, prepare, prepared_root
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import ArtifactError
from yggdrasil.native import is_native
from yggdrasil.native.arena import Arena
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.native_steps.loading import description_of, load_described

_FILE = "tensors.safetensors"
_DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "U8": torch.uint8, "I8": torch.int8,
    "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Source files that determine the tensors' layout; a change of one invalidates cached tensors.
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
    """Load a model for building steps, by the fastest way that supports it.

    On a CPU, models that native steps cover are packed directly from their mapped file or, if they are quantised at
    load, read from the disk cache (and written to it the first time). All others are loaded with transformers.

    Args:
        source: folder, GGUF file or hub id.
        num_threads: threads of the model's kernels.
        weights: "full" (unquantised); "file" to keep the quantised blocks of the file; or a format to quantise to.
        is_described: whether weights may be packed directly from the mapped file. Only native steps can read the
            resulting layout.

    Raises:
        YggdrasilError: the checkpoint is missing, damaged or unsupported.
    """
    found = Source.find(source)
    if found.gguf is None:
        check_weights(found.folder)
    trim_heap()  # reading the tokenizer before has freed much memory

    def load() -> LoadedModel:
        from yggdrasil.runtime.loading import load_model  # imports transformers' models

        return load_model(found, dtype, device, num_threads, weights=weights)

    is_on_cpu = device.type == "cpu"
    if is_on_cpu and is_described:
        described = load_described(found, dtype, num_threads, weights, lambda: load().model)
        if described is not None:
            return described
    drop_reserved()
    drop_begun()
    if not is_on_cpu or not _is_kept(found, weights):
        return load()
    folder = _folder(found, dtype, weights)
    kept = _kept(folder)
    if kept is None:
        in_fork(lambda: str(_keep(load(), folder)))
        kept = _kept(folder)
    if kept is None:
        return load()
    tensors, record = kept
    sizes = ModelSizes.from_record(record["sizes"])
    return LoadedModel(
        found.given, sizes, num_threads, dtype, device, tensors, record["formats"],
        record["facts"], record["config"], lambda: load().model,
    )  # fmt: skip


def keep_model(loaded: LoadedModel, source: str | Path | Source, weights: Weights) -> None:
    """Write the packed tensors of a loaded model to the disk cache, from which later starts read them.

    The model must have been loaded from ``source`` with ``weights``. Nothing is written if it is on a GPU, was not
    quantised at load, is not covered by native steps, or is cached already.
    """
    found = Source.find(source)
    if loaded.device.type != "cpu" or not _is_kept(found, weights):
        return
    folder = _folder(found, loaded.dtype, weights)
    if not is_whole(folder, _layout(), sampled=_FILE):
        _keep(loaded, folder)


def _is_kept(source: Source, weights: Weights) -> bool:
    """Return whether the model's tensors are cached: if it is quantised at load and covered by native steps."""
    return weights not in ("full", "file") and is_native() and description_of(source) is not None


def _folder(source: Source, dtype: torch.dtype, weights: Weights) -> Path:
    """Return the cache folder of a model in this dtype and weight format."""
    return prepared_root() / source.fingerprint() / f"packed-{str(dtype).removeprefix('torch.')}-{weights}"


def _kept(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return (tensors by name, record) from ``folder``, or None if it is incomplete, damaged or of another layout."""
    if not is_whole(folder, _layout(), sampled=_FILE):
        return None
    try:
        return _read(folder / _FILE)
    except (OSError, ValueError, KeyError):  # a process of another version may be replacing it
        return None


def _keep(loaded: LoadedModel, folder: Path) -> Path:
    """Write the tensors to ``folder`` if the disk has room and ``_NAMES`` has their dtypes; return ``folder``."""
    if _has_room(loaded) and all(tensor.dtype in _NAMES for tensor in loaded.tensors.values()):
        with suppress(ArtifactError):  # if it cannot be written, the next start quantises again
            prepare(folder, _layout(), lambda partial: _write(loaded, partial / _FILE), sampled=_FILE)
    return folder


@cache
def _layout() -> str:
    """Return a hash of all that the tensors' layout depends on, except the model: versions, machine and sources."""
    import transformers  # imported late: natively loaded models do not need it

    digest = hashlib.sha256()
    for part in (torch.__version__, transformers.__version__, current_machine().fingerprint, str(is_native())):
        digest.update(part.encode())
    for pattern in _SOURCES:
        for file in sorted(Path(__file__).parents[1].glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _has_room(loaded: LoadedModel) -> bool:
    """Return whether the disk has twice the size of the tensors free."""
    folder = prepared_root()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free > 2 * sum(tensor.nbytes for tensor in loaded.tensors.values())


def _write(loaded: LoadedModel, file: Path) -> None:
    """Write the tensors and their record to ``file``, without a second copy in memory."""
    record = {
        "config": loaded.described, "formats": loaded.formats, "facts": dict(loaded.config),
        "sizes": asdict(loaded.sizes),
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
    """Read (tensors by name, record) from ``file`` into an arena; return None if a checksum or the layout differs.

    The layout is checked again here, as another process may have replaced the file since ``is_whole``.
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
    """Return a checksum of each tensor, the sum of its 8-byte words; it detects any single changed word."""
    sums = []
    for tensor in tensors.values():
        content = _bytes_of(tensor.contiguous())
        words = content[: content.size // 8 * 8].view("int64")
        sums.append(int(words.sum()) + int(content[words.nbytes :].sum()))
    return sums


def _bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous CPU tensor as a NumPy uint8 view."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
