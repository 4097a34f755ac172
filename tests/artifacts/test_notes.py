"""What is noted of a file is used for as long as the file stays as it is."""

import json
import os

import pytest

from yggdrasil.artifacts import notes
from yggdrasil.artifacts.gguf import BLOCK_SIZES
from yggdrasil.artifacts.notes import cached_for_file


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(notes, "_known", {})
    (tmp_path / "file").write_text("one")
    return tmp_path / "file"


def forgotten(path, name):
    """As another process finds it."""
    notes._known.clear()
    return cached_for_file(path, name, lambda: [path.read_text(), name])


def test_a_value_is_made_once_for_a_state_of_the_file(file, monkeypatch):
    assert forgotten(file, "a") == ["one", "a"]
    monkeypatch.setattr(type(file), "read_text", None)
    assert forgotten(file, "a") == ["one", "a"]
    assert cached_for_file(file, "a", None) == ["one", "a"]


@pytest.mark.parametrize("change", ["content", "time", "name", "damage", "unwritable"])
def test_anything_else_makes_it_anew(file, tmp_path, change):
    forgotten(file, "a")
    (note,) = (tmp_path / "cache" / "notes").iterdir()
    if change == "content":
        before = file.stat()
        file.write_text("two")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # which the time of the change betrays
    elif change == "time":
        os.utime(file)
    elif change == "damage":
        for content in ("", "{", "[]", json.dumps({"state": json.loads(note.read_text())["state"]})):
            note.write_text(content)
            assert forgotten(file, "a") == ["one", "a"]
    elif change == "unwritable":
        note.unlink()
        note.parent.rmdir()
        note.parent.write_text("a file in the place of the folder")
    name = "b" if change == "name" else "a"

    assert forgotten(file, name) == [file.read_text(), name]
    assert cached_for_file(file, name, None) == [file.read_text(), name]


def test_sizes_of_blocks_are_those_of_gguf():
    from gguf.constants import GGML_QUANT_SIZES

    assert {int(kind): size for kind, size in GGML_QUANT_SIZES.items()} == BLOCK_SIZES
