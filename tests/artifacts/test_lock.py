"""A lock file lets one process in, ends with its owner, and is never held by two."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from full_disk import full_disk

from yggdrasil.artifacts.lock import locked
from yggdrasil.errors import ArtifactError

HOLD = """
import sys, time
from pathlib import Path
from yggdrasil.artifacts.lock import locked

with locked(Path(sys.argv[1]), "a test"):
    print("held", flush=True)
    sys.stdin.read()
"""


def held_elsewhere(path: Path) -> "subprocess.Popen[str]":
    """A process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_told_who_is_at_it(tmp_path: Path) -> None:
    with (
        held_elsewhere(tmp_path / "lock") as process,
        pytest.raises(ArtifactError, match=f"a test is under way in process {process.pid}, begun .* s ago; wait"),
        locked(tmp_path / "lock", "a test"),
    ):
        pytest.fail("two hold it")


def test_the_end_of_another_process_can_be_waited_for(tmp_path: Path) -> None:
    path, messages = tmp_path / "lock", []
    with held_elsewhere(path) as process:

        def let_go(sentence: str) -> None:
            assert process.poll() is None
            messages.append(sentence)
            assert process.stdin is not None
            process.stdin.close()

        with locked(path, "a test", wait=let_go):
            assert process.wait() == 0
            with pytest.raises(ArtifactError, match="a test is under way"), locked(path, "a test"):
                pytest.fail("two hold it")
    assert len(messages) == 1
    assert f"in process {process.pid}" in messages[0]


def test_folders_that_it_makes_go_with_it_where_nothing_is_in_them(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b" / "lock", "a test"):
        pass
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b" / "lock", "a test"):
        (tmp_path / "a" / "kept").touch()
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "kept"]


def test_whoever_waits_makes_the_folder_anew_that_went_with_the_lock(tmp_path: Path) -> None:
    path, waits, held = tmp_path / "a" / "lock", threading.Event(), []

    def wait() -> None:
        with locked(path, "a test", wait=lambda _: waits.set()):
            held.append(path.exists())

    second = threading.Thread(target=wait)
    with locked(path, "a test"):
        second.start()
        assert waits.wait(20)
    second.join(20)

    assert held == [True]


def test_where_nothing_locks_the_folder_is_made_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with locked(tmp_path / "a" / "lock", "a test"):
        (tmp_path / "a" / "file").touch()


def test_a_lock_ends_with_its_owner(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "lock") as process:
        process.kill()
        process.wait()
        with locked(tmp_path / "lock", "a test"):
            pass
    assert not (tmp_path / "lock").exists()


def test_a_file_that_its_owner_took_along_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before the last owner removed it and locked after: whoever comes next makes a file of that name anew."""
    path, flock, taken = tmp_path / "lock", fcntl.flock, []

    def flock_late(file: object, how: int) -> None:
        if not taken:
            path.unlink()
            taken.append(file)
        flock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with locked(path, "a test"):
        monkeypatch.undo()
        with pytest.raises(ArtifactError, match="a test is under way"), locked(path, "a test"):
            pytest.fail("two hold it")


@pytest.mark.parametrize("waits", [False, True])
def test_where_the_file_system_knows_no_locks_the_block_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    wait = (lambda sentence: pytest.fail(sentence)) if waits else None
    with locked(tmp_path / "a" / "lock", "a test", wait):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_fails_is_not_taken_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with (
        pytest.raises(ArtifactError, match=r"cannot lock .*lock \(Input/output error\); check"),
        locked(tmp_path / "lock", "a test"),
    ):
        pytest.fail("the block must not run")


def test_on_a_full_disk_a_lock_holds_without_its_text_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "a" / "lock"
    with (
        full_disk(),
        locked(path, "a test"),
        pytest.raises(ArtifactError, match="a test is under way in another process"),
        locked(path, "a test"),
    ):
        pytest.fail("two hold it")
    assert list(tmp_path.iterdir()) == []


def test_a_fork_of_the_same_command_is_waited_for_in_silence(tmp_path: Path) -> None:
    path, (ready, say) = tmp_path / "lock", os.pipe()
    fork = os.fork()
    if not fork:
        try:
            with locked(path, "a test"):
                os.write(say, b"x")
                time.sleep(0.2)
        finally:
            os._exit(0)
    assert os.read(ready, 1) == b"x"
    with locked(path, "a test", wait=lambda sentence: pytest.fail(sentence)):
        pass
    os.waitpid(fork, 0)
