"""Files and folders appear whole or not at all."""

import os
from pathlib import Path
from threading import Thread

import pytest

from yggdrasil.artifacts.atomic import atomic_directory, check_writable, shown, write_atomic
from yggdrasil.errors import ArtifactError


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_write_atomic_makes_parents_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_atomic(path, b"one")
    write_atomic(path, b"two")

    assert path.read_bytes() == b"two"
    assert names(path.parent) == ["b.txt"]


def test_write_atomic_keeps_the_old_file_when_replacing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.txt"
    path.write_bytes(b"old")

    def fail(_self: Path, _target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ArtifactError, match=r"cannot write .*b\.txt \(No space left on device\); check"):
        write_atomic(path, b"new")

    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["b.txt"]


def test_write_atomic_under_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(ArtifactError, match="cannot write"):
        write_atomic(tmp_path / "file" / "b.txt", b"new")


def test_directory_appears_whole(tmp_path: Path) -> None:
    place = tmp_path / "profiles" / "demo"
    with atomic_directory(place) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text("a")
        assert not place.exists()

    assert (place / "sub" / "a.txt").read_text() == "a"
    assert names(place.parent) == ["demo"]


def test_files_of_a_directory_can_be_read_by_whoever_may_read_the_directory(tmp_path: Path) -> None:
    """safetensors writes files that are their owner's alone; a drafter that one user trains, another serves."""
    before = os.umask(0o027)
    try:
        with atomic_directory(tmp_path / "demo") as folder:
            (folder / "sub").mkdir()
            for name in ("weights", "sub/weights"):
                (folder / name).touch(mode=0o600)
    finally:
        os.umask(before)

    assert (tmp_path / "demo").stat().st_mode & 0o777 == 0o750
    assert [(tmp_path / "demo" / name).stat().st_mode & 0o777 for name in ("weights", "sub/weights")] == [0o640] * 2


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with old content."""
    place = tmp_path / "demo"
    place.mkdir()
    (place / "old.txt").write_text("old")
    return place


def replaced(place: Path, fault: BaseException | None = None) -> None:
    with atomic_directory(place) as folder:
        (folder / "new.txt").write_text("new")
        if fault is not None:
            raise fault


def test_directory_replaces_the_old_one_as_a_whole(place: Path) -> None:
    replaced(place)

    assert names(place) == ["new.txt"]
    assert names(place.parent) == ["demo"]


@pytest.mark.parametrize("fault", [ValueError(), KeyboardInterrupt(), None], ids=["error", "interrupt", "no rename"])
def test_failure_leaves_the_old_content_and_no_temporary_names(
    place: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException | None
) -> None:
    """Inside the block, or where the new folder cannot take the place of the old one."""
    rename = Path.rename

    def fail_for_the_new_one(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(ArtifactError if fault is None else type(fault), match=None if fault else "Input/output error"):
        replaced(place, fault)

    assert names(place) == ["old.txt"]
    assert names(place.parent) == ["demo"]


def test_directory_over_a_file_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "demo"
    place.write_text("x")

    with pytest.raises(ArtifactError, match="demo is a file where a folder belongs"), atomic_directory(place):
        pytest.fail("the block must not run")
    assert place.read_text() == "x"


def test_directory_follows_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with atomic_directory(tmp_path / "link") as folder:
        (folder / "new.txt").write_text("new")

    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == ["new.txt"]


@pytest.mark.parametrize("there", [True, False])
def test_write_atomic_follows_a_symbolic_link(tmp_path: Path, there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    if there:
        (tmp_path / "elsewhere" / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("elsewhere/real")
    write_atomic(tmp_path / "link", b"new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "real").read_bytes() == b"new"
    assert names(tmp_path / "elsewhere") == ["real"]


def test_what_a_link_points_at_has_to_be_writable(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/nothing/below")

    for is_folder in (False, True):
        with pytest.raises(ArtifactError, match=r"cannot write .*link"):
            check_writable(tmp_path / "link", is_folder=is_folder)


def test_shown_is_relative_inside_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    assert shown(tmp_path / "here" / "plans" / "x.yaml") == "plans/x.yaml"
    assert shown(tmp_path / "x.yaml") == str(tmp_path / "x.yaml")


def test_a_pipe_or_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    """Renamed over, /dev/null would be a file from then on."""
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()

    write_atomic(pipe, b"data")
    reader.join(10)

    assert found == [b"data"]
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_can_be_written_is_known_beforehand(tmp_path: Path, is_folder: bool) -> None:
    check_writable(tmp_path / "new" / "below", is_folder=is_folder)
    (tmp_path / "file").touch()

    for wrong in ("file/below", "x" * 300):
        with pytest.raises(ArtifactError, match="cannot write"):
            check_writable(tmp_path / wrong, is_folder=is_folder)
    with pytest.raises(ArtifactError, match=r"is a (file|folder), not a"):
        check_writable(tmp_path / "file" if is_folder else tmp_path, is_folder=is_folder)

    assert names(tmp_path) == ["file"]


def test_a_folder_that_is_a_link_to_itself_is_named(tmp_path):
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(ArtifactError, match=r"loop is a link to itself"), atomic_directory(tmp_path / "loop"):
        pass
    for is_folder in (False, True):
        with pytest.raises(ArtifactError, match=r"loop is a link to itself"):
            check_writable(tmp_path / "loop", is_folder=is_folder)
        (tmp_path / "to-come").unlink(missing_ok=True)
        (tmp_path / "to-come").symlink_to("made-later")
        check_writable(tmp_path / "to-come", is_folder=is_folder)
