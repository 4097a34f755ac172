"""What a killed process leaves is removed by the next; what another still writes is not."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from yggdrasil.artifacts import leftovers
from yggdrasil.artifacts.atomic import atomic_directory, write_atomic
from yggdrasil.artifacts.leftovers import in_use, remove_leftovers, temporary_folder

ROOT = Path(__file__).parents[2]
WAYS = {
    "a folder": "with temporary_folder(Path('place')) as folder: (folder / 'half').touch(); wait()",
    "a file": "os.fsync = lambda _: wait()\nwrite_atomic(Path('place/x.json'), b'half')",
    "a folder that takes another's place": (
        "with atomic_directory(Path('place/x')) as folder: (folder / 'half').touch(); wait()"
    ),
}
WRITER = """
import os, sys
from pathlib import Path
from yggdrasil.artifacts.atomic import atomic_directory, write_atomic
from yggdrasil.artifacts.leftovers import temporary_folder

def wait():
    print("here", flush=True)
    sys.stdin.read()

"""


def temporary(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def age(folder: Path) -> None:
    for path in temporary(folder):
        os.utime(path, (0, 0))


@pytest.mark.parametrize("way", WAYS)
def test_it_is_removed_once_its_process_is_gone_and_not_before(tmp_path: Path, way: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER + WAYS[way]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path,
        env=environment,
    ) as writer:  # fmt: skip
        assert writer.stdout is not None
        writer.stdout.readline()
        age(place)
        remove_leftovers(place)
        assert len(temporary(place)) == 1
        writer.kill()
        writer.wait()

    assert len(temporary(place)) == 1, "SIGKILL leaves no chance to tidy up"
    remove_leftovers(place)
    assert temporary(place) == []


def test_whoever_writes_the_same_thing_again_tidies_up(tmp_path: Path) -> None:
    for name in (".x.json.0123abcd.tmp", ".x.0123abcd.tmp"):
        (tmp_path / name).touch()
    mine = tmp_path / ".x.json.notes.tmp"  # nothing of ours is called so
    mine.touch()
    age(tmp_path)

    write_atomic(tmp_path / "x.json", b"whole")
    assert {path.name for path in temporary(tmp_path)} == {".x.0123abcd.tmp", mine.name}
    with atomic_directory(tmp_path / "x"):
        pass
    assert temporary(tmp_path) == [mine]
    assert mine.exists()


@pytest.mark.parametrize("name", ["x", "head[1]"])
def test_a_folder_killed_between_two_renames_is_back_and_replaced(tmp_path: Path, name: str) -> None:
    """Its old content is not lost, whatever becomes of the new."""
    backup = tmp_path / f".{name}.0123abcd.old"
    backup.mkdir()
    (backup / "old").touch()
    with pytest.raises(RuntimeError), atomic_directory(tmp_path / name):
        raise RuntimeError
    assert [path.name for path in (tmp_path / name).iterdir()] == ["old"]
    assert temporary(tmp_path) == []


def test_what_another_folder_had_aside_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    others = [tmp_path / f".x.{name}.old" for name in ("v2.0123abcd", "notes")]
    for other in others:
        other.mkdir()
    for _ in range(2):  # while there is no x, and when there is one
        with atomic_directory(tmp_path / "x"):
            pass
    assert sorted(temporary(tmp_path)) == sorted(others)


def test_a_folder_is_gone_after_its_block_and_leftovers_when_one_begins(tmp_path: Path) -> None:
    left = tmp_path / ".left.tmp"
    left.mkdir()
    age(tmp_path)

    with temporary_folder(tmp_path) as folder:
        assert folder.is_dir()
        assert not left.exists()
    assert temporary(tmp_path) == []


def test_what_was_made_this_moment_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may not have locked it yet."""
    newborn = tmp_path / ".x.tmp"
    newborn.touch()
    now = [newborn.stat().st_mtime + 0.9]
    monkeypatch.setattr(leftovers, "time", SimpleNamespace(time=lambda: now[0]))
    remove_leftovers(tmp_path)
    assert newborn.exists()
    now[0] += 0.2
    remove_leftovers(tmp_path)
    assert not newborn.exists()
    with in_use(tmp_path / "none"):  # a file system without locks is no fault
        pass
