"""Fingerprints of checkpoints and tokenizers, which are fast to compute and independent of file locations."""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from yggdrasil.artifacts.atomic import shown
from yggdrasil.artifacts.gguf import is_gguf, read_gguf_header, read_gguf_layout
from yggdrasil.artifacts.notes import cached_for_file
from yggdrasil.artifacts.plain import parse_json
from yggdrasil.errors import ArtifactError

_MIB = 2**20
_WHOLE_BYTES = 64 * _MIB  # a weight file up to this size is hashed completely
_WHOLE_GGUF_BYTES = 256 * _MIB  # a GGUF file up to this size is hashed completely, in 0.1 s
_NUM_SAMPLES = 16  # evenly spaced
_SAMPLE_BYTES = _MIB
_TENSOR_SAMPLE_BYTES = 4096  # from the middle of each tensor, to detect a change of one layer
_DIGITS = 16

# Saving a checkpoint again rewrites these without changing the model.
_INCIDENTAL_CONFIG_KEYS = ("transformers_version", "_name_or_path")
# Sections that affect the conversion of text to ids and back, unlike padding, truncation and templates.
_TOKENIZER_SECTIONS = ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")
_OTHER_VOCABULARIES = ("vocab.json", "tokenizer.model", "spiece.model", "vocab.txt", "tekken.json")
OWN_HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")  # draft heads, possibly in a model's folder
PICKLED_HEAD = "pytorch_model.bin"
_OTHER_TOKENIZER_FILES = (*_OTHER_VOCABULARIES, "merges.txt", "added_tokens.json")


def model_fingerprint(path: Path) -> str:
    """Return the fingerprint of a checkpoint's configuration and weights, 16 hexadecimal digits.

    Weight files up to 64 MiB (GGUF files up to 256 MiB) are hashed completely. Of larger files, the header,
    16 samples of 1 MiB, and 4 KiB from the middle of each tensor are hashed. File names and folders do not matter.

    Args:
        path: checkpoint folder or GGUF file.

    Raises:
        ArtifactError: the file, the folder, its config.json or its safetensors weights are missing or damaged.
    """
    if is_gguf(path):
        return _gguf_fingerprint(path.absolute())
    _check_folder(path)
    config = _read_json(path / "config.json")
    if not isinstance(config, dict):
        raise ArtifactError(f"{shown(path / 'config.json')} is not a JSON mapping; fetch the checkpoint again.")
    hasher = hashlib.sha256()
    _add_json(hasher, {key: value for key, value in config.items() if key not in _INCIDENTAL_CONFIG_KEYS})
    heads = head_files(path)
    weights = weight_files(path) if not heads or _has_weights(path) else []
    for file in dict.fromkeys([*weights, *heads]):
        if file.suffix == ".safetensors":
            _add_weights(hasher, file)
            continue
        with file.open("rb") as stream:
            _add_spans(hasher, stream, _spans_of(file.stat().st_size, 0, [], whole=_WHOLE_BYTES))
    return hasher.hexdigest()[:_DIGITS]


def head_files(path: Path) -> list[Path]:
    """Return the weight files of a draft head in the folder ``path``, or an empty list if there are none.

    The result is medusa_lm_head.safetensors or .pt, else the safetensors files by name, else pytorch_model.bin.

    Raises:
        ArtifactError: the index of the weights is damaged or lists a missing file.
    """
    own = [path / name for name in OWN_HEADS if (path / name).is_file()]
    if own:
        return own[:1]
    if _has_weights(path):
        return weight_files(path)
    return [path / PICKLED_HEAD] if (path / PICKLED_HEAD).is_file() else []


def check_weights(path: Path) -> None:
    """Check that the safetensors weights of the checkpoint folder ``path`` are complete. Only headers are read.

    Raises:
        ArtifactError: the folder has no safetensors weights, or a file is missing or truncated.
    """
    for file in weight_files(path):
        with file.open("rb") as stream:
            _read_header(stream, file, file.stat().st_size)


def packed_bytes(path: Path) -> int:
    """Return the bytes that a folder's or GGUF file's weights take in memory, with float32 loaded as bfloat16.

    Raises:
        ArtifactError: the file or folder is damaged.
    """
    if is_gguf(path):
        return sum(tensor.num_bytes >> (tensor.kind == 0) for tensor in read_gguf_layout(path).tensors.values())
    config = _read_json(path / "config.json")
    dtypes = [config.get(key) for key in ("dtype", "torch_dtype")] if isinstance(config, dict) else []
    return sum(file.stat().st_size for file in weight_files(path)) >> ("float32" in dtypes)


def tokenizer_fingerprint(path: Path) -> str:
    """Return the fingerprint of a tokenizer's vocabulary, merges and text handling, 16 hexadecimal digits.

    Two folders agree if their tokenizer.json files have equal content, whatever the formatting. Without a
    tokenizer.json, the bytes of the other tokenizer files are hashed; the result never equals that of a tokenizer.json.
    Fingerprints of a folder and of a GGUF file never agree.

    Args:
        path: folder or GGUF file.

    Raises:
        ArtifactError: the folder or its tokenizer files are missing or damaged.
    """
    hasher = hashlib.sha256()
    if is_gguf(path):
        facts = read_gguf_header(path).facts
        _add_json(hasher, {key: value for key, value in facts.items() if key.startswith("tokenizer.ggml.")})
        return hasher.hexdigest()[:_DIGITS]
    _check_folder(path)
    if (path / "tokenizer.json").is_file():
        _add_json(hasher, _normalised_tokenizer(path / "tokenizer.json"))
        return hasher.hexdigest()[:_DIGITS]
    if not any((path / name).is_file() for name in _OTHER_VOCABULARIES):
        wanted = ", ".join(("tokenizer.json", *_OTHER_VOCABULARIES))
        raise ArtifactError(
            f"{shown(path)} has no tokenizer (none of {wanted}); copy the model's tokenizer files there."
        )
    for name in _OTHER_TOKENIZER_FILES:
        if (path / name).is_file():
            data = (path / name).read_bytes()
            hasher.update(f"{name} {len(data)}\n".encode())
            hasher.update(data)
    return hasher.hexdigest()[:_DIGITS]


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files that make up the checkpoint folder ``path``, in name order.

    Raises:
        ArtifactError: the folder has no safetensors weights, or its index is damaged or lists a missing file.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        content = _read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ArtifactError(f"{shown(index)} has no weight_map; fetch the checkpoint again.")
        files = sorted({path / str(name) for name in weight_map.values()})
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = next((file.name for suffix in ("*.bin", "*.pt", "*.pth") for file in path.glob(suffix)), None)
        others = f" (only {pickled}, a pickle, which may run code when it is read)" if pickled else ""
        raise ArtifactError(
            f"{shown(path)} has no *.safetensors weights{others}; save the model again with `save_pretrained`."
        )
    for file in files:
        if not file.is_file():
            raise ArtifactError(f"{shown(file)} is missing, though the index lists it; fetch the checkpoint again.")
    return files


def _has_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors*"))


def _gguf_fingerprint(path: Path) -> str:
    def digest() -> str:
        hasher = hashlib.sha256()
        with path.open("rb") as stream:
            _add_spans(hasher, stream, _gguf_spans(path, path.stat().st_size))
        return hasher.hexdigest()[:_DIGITS]

    return str(cached_for_file(path, "fingerprint 1", digest))


def _gguf_spans(path: Path, num_bytes: int) -> list[tuple[int, int]]:
    if num_bytes <= _WHOLE_GGUF_BYTES:
        return [(0, num_bytes)]  # without parsing the header, which has the whole vocabulary
    header = read_gguf_layout(path)
    middles = [_middle(tensor.start, tensor.start + tensor.num_bytes) for tensor in header.tensors.values()]
    return _spans_of(num_bytes, header.data_start, middles, whole=_WHOLE_GGUF_BYTES)


def _add_weights(hasher: "hashlib._Hash", file: Path) -> None:
    num_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_end, spans = _read_header(stream, file, num_bytes)
        hasher.update(f"weights {num_bytes}\n".encode())
        _add_spans(hasher, stream, _spans_of(num_bytes, header_end, spans, whole=_WHOLE_BYTES))


def _spans_of(num_bytes: int, header_end: int, middles: list[tuple[int, int]], *, whole: int) -> list[tuple[int, int]]:
    """Return the parts (start, length), in bytes, of a weight file that its fingerprint hashes."""
    if num_bytes <= whole:
        return [(0, num_bytes)]
    stride = (num_bytes - header_end - _SAMPLE_BYTES) / (_NUM_SAMPLES - 1)
    samples = [(header_end + int(index * stride), _SAMPLE_BYTES) for index in range(_NUM_SAMPLES)]
    return [(0, header_end), *middles, *samples]


def _add_spans(hasher: "hashlib._Hash", stream: BinaryIO, spans: list[tuple[int, int]]) -> None:
    for start, length in spans:
        stream.seek(start)
        while length > 0:
            part = stream.read(min(length, _MIB))
            if not part:
                break
            hasher.update(part)
            length -= len(part)


def _read_header(stream: BinaryIO, file: Path, num_bytes: int) -> tuple[int, list[tuple[int, int]]]:
    """Return (end of the header of a safetensors file, a span (start, length) in the middle of each tensor)."""
    damaged = ArtifactError(f"{shown(file)} is truncated or not a safetensors file; fetch the checkpoint again.")
    length = int.from_bytes(stream.read(8), "little")
    header_end = 8 + length
    if num_bytes < 8 or header_end > num_bytes:
        raise damaged
    try:
        header = parse_json(stream.read(length))
        offsets = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
        last = max((end for _, end in offsets), default=0)
        spans = [_middle(header_end + start, header_end + end) for start, end in offsets]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged from error
    if header_end + last != num_bytes:
        raise damaged
    return header_end, spans


def _middle(start: int, end: int) -> tuple[int, int]:
    length = min(_TENSOR_SAMPLE_BYTES, end - start)
    return (start + end - length) // 2, length


def _normalised_tokenizer(file: Path) -> dict[str, Any]:
    """Return the relevant content of a tokenizer.json, independent of the version that wrote it."""
    content = _read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ArtifactError(f"{shown(file)} has no model section; copy the model's tokenizer files again.")
    sections = {name: content.get(name) for name in _TOKENIZER_SECTIONS}
    # Newer versions write options that older ones omit.
    model = {key: value for key, value in content["model"].items() if value not in (None, False, "")}
    if isinstance(model.get("merges"), list):
        # "a b" in old files, ["a", "b"] in new ones.
        model["merges"] = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    added = content.get("added_tokens") or []
    return {
        **sections,
        "model": model,
        "added_tokens": sorted(added, key=lambda token: json.dumps(token, sort_keys=True)),
    }


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ArtifactError(
            f"{path} is not a model folder or GGUF file on this machine; check the path or download the model first."
        )


def _read_json(file: Path) -> object:
    try:
        return parse_json(file.read_bytes())
    except FileNotFoundError as error:
        raise ArtifactError(f"{shown(file)} is missing; check the path or fetch the checkpoint again.") from error
    except ValueError as error:
        raise ArtifactError(f"{shown(file)} is not valid JSON; fetch the file again.") from error


def _add_json(hasher: "hashlib._Hash", content: object) -> None:
    hasher.update(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
