"""Fingerprints of checkpoints and tokenizers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from yggdrasil.artifacts import models
from yggdrasil.artifacts.models import model_fingerprint, tokenizer_fingerprint
from yggdrasil.errors import ArtifactError

CONFIG = {"model_type": "llama", "hidden_size": 4, "transformers_version": "5.0"}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 3, "content": "<s>", "special": True}, {"id": 4, "content": "</s>", "special": True}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "use_regex": True},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "dropout": None, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    safetensors.numpy.save_file(
        {"a": np.zeros(64, np.float32), "b": np.ones(64, np.float32)}, folder / "model.safetensors"
    )
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


def flip_byte(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


# --- models ---


def test_model_fingerprint_does_not_depend_on_the_place(checkpoint: Path, tmp_path: Path) -> None:
    first = model_fingerprint(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "copy")

    assert len(first) == 16
    assert model_fingerprint(tmp_path / "copy") == first


def test_model_fingerprint_ignores_config_layout(checkpoint: Path) -> None:
    first = model_fingerprint(checkpoint)
    saved_again = {**dict(reversed(CONFIG.items())), "transformers_version": "5.1"}
    (checkpoint / "config.json").write_text(json.dumps(saved_again, indent=2))

    assert model_fingerprint(checkpoint) == first


def test_model_fingerprint_follows_the_config(checkpoint: Path) -> None:
    first = model_fingerprint(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1e6}))

    assert model_fingerprint(checkpoint) != first


@pytest.mark.parametrize("offset", [-1, -512])
def test_model_fingerprint_follows_each_weight_byte(checkpoint: Path, offset: int) -> None:
    first = model_fingerprint(checkpoint)
    flip_byte(checkpoint / "model.safetensors", offset)

    assert model_fingerprint(checkpoint) != first


def test_large_files_are_sampled(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(models, "_SAMPLE_BYTES", 4)
    monkeypatch.setattr(models, "_NUM_SAMPLES", 2)
    monkeypatch.setattr(models, "_TENSOR_SAMPLE_BYTES", 4)
    file = checkpoint / "model.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(16, np.float32), "b": np.ones(16, np.float32)}, file)
    first = model_fingerprint(checkpoint)

    def is_seen(offset: int) -> bool:
        flip_byte(file, offset)
        changed = model_fingerprint(checkpoint) != first
        flip_byte(file, offset)
        return changed

    # Two tensors of 64 bytes: the first and last bytes of all, and the middle of each, are samples; the rest is not.
    assert [offset for offset in range(-128, 0) if is_seen(offset)] == [
        *range(-128, -124),
        *range(-98, -94),
        *range(-34, -30),
        *range(-4, 0),
    ]


def test_shards_come_from_the_index(checkpoint: Path) -> None:
    single = model_fingerprint(checkpoint)
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    safetensors.numpy.save_file({"c": np.zeros(4)}, checkpoint / "model-2.safetensors")
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"}}))
    sharded = model_fingerprint(checkpoint)
    safetensors.numpy.save_file({"d": np.zeros(4)}, checkpoint / "consolidated.safetensors")

    assert sharded != single
    assert model_fingerprint(checkpoint) == sharded

    (checkpoint / "model-2.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"model-2\.safetensors is missing, though the index lists it"):
        model_fingerprint(checkpoint)
    index.write_text("{}")
    with pytest.raises(ArtifactError, match="has no weight_map"):
        model_fingerprint(checkpoint)


def truncate(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: shutil.rmtree(folder),
            "is not a model folder or GGUF file on this machine; check the path or download",
        ),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (lambda folder: truncate(folder / "config.json", 5), r"config\.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json is not a JSON mapping"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            r"has no \*\.safetensors weights; save the model again",
        ),
        (lambda folder: truncate(folder / "model.safetensors", 600), r"model\.safetensors is truncated"),
        (lambda folder: truncate(folder / "model.safetensors", 20), r"model\.safetensors is truncated"),
        (lambda folder: truncate(folder / "model.safetensors", 0), r"model\.safetensors is truncated"),
        (lambda folder: (folder / "model.safetensors").write_bytes(bytes(8)), "or not a safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"[]"), "or not a safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"has no tokenizer \(none of tokenizer\.json, vocab"),
        (lambda folder: truncate(folder / "tokenizer.json", 9), r"tokenizer\.json is not valid JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), r"tokenizer\.json has no model section"),
    ],
)
def test_damaged_checkpoints_are_refused(checkpoint: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(checkpoint)
    fingerprint = tokenizer_fingerprint if "tokenizer" in message else model_fingerprint

    with pytest.raises(ArtifactError, match=message):
        fingerprint(checkpoint)


# --- tokenizers ---


def fingerprint_of(folder: Path, **sections: Any) -> str:
    (folder / "tokenizer.json").write_text(json.dumps({**TOKENIZER, **sections}, sort_keys=True, indent=1))
    return tokenizer_fingerprint(folder)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"truncation": {"max_length": 5}, "padding": {"pad_id": 3}, "post_processor": {"type": "ByteLevel"}},
        {"added_tokens": TOKENIZER["added_tokens"][::-1]},
        {"model": {**TOKENIZER["model"], "merges": [["a", "b"]], "ignore_merges": False, "unk_token": ""}},
    ],
)
def test_tokenizer_fingerprint_ignores_layout(checkpoint: Path, sections: dict[str, Any]) -> None:
    first = tokenizer_fingerprint(checkpoint)

    assert len(first) == 16
    assert fingerprint_of(checkpoint, **sections) == first


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {**TOKENIZER["model"], "vocab": {"a": 0, "b": 1, "aB": 2}}},
        {"model": {**TOKENIZER["model"], "vocab": {"a": 1, "b": 0, "ab": 2}}},
        {"model": {**TOKENIZER["model"], "merges": ["b a"]}},
        {"model": {**TOKENIZER["model"], "byte_fallback": True}},
        {"added_tokens": TOKENIZER["added_tokens"][:1]},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
        {"decoder": None},
    ],
)
def test_tokenizer_fingerprint_follows_what_it_does(checkpoint: Path, sections: dict[str, Any]) -> None:
    first = tokenizer_fingerprint(checkpoint)

    assert fingerprint_of(checkpoint, **sections) != first


def test_other_tokenizer_files(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("a b")
    first = tokenizer_fingerprint(tmp_path)
    (tmp_path / "unrelated.txt").write_text("x")
    assert tokenizer_fingerprint(tmp_path) == first

    (tmp_path / "merges.txt").write_text("a c")
    assert tokenizer_fingerprint(tmp_path) != first
