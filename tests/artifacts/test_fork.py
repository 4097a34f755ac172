"""Work in a fork: its answer and its faults come back, its memory does not, and it ends with who asked for it."""

import os
import signal
import sys
from pathlib import Path
from time import sleep

import pytest

from yggdrasil.artifacts import fork
from yggdrasil.artifacts.fork import Fork, begin_in_fork, in_fork
from yggdrasil.errors import ArtifactError, YggdrasilError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def test_its_answer_comes_back_and_nothing_else():
    changed = []

    def work():
        changed.append(1)
        return f"wörk {os.getpid()}"

    word, pid = in_fork(work).split()
    assert (word, changed) == ("wörk", [])
    assert int(pid) != os.getpid()
    assert not Path(f"/proc/{pid}").exists()


def test_what_is_begun_in_a_fork_runs_while_this_process_goes_on(tmp_path):
    def work():
        while not (tmp_path / "gone on").exists():
            sleep(0.01)
        return "done"

    wait = begin_in_fork(work)
    (tmp_path / "gone on").touch()
    assert wait() == "done"


@pytest.mark.parametrize("kind", [YggdrasilError, ArtifactError])
def test_a_fault_that_the_user_can_mend_is_raised_here(kind):
    def work():
        raise kind("the file is gone; fetch it")

    with pytest.raises(kind, match="the file is gone; fetch it") as raised:
        in_fork(work)
    assert type(raised.value) is kind


def test_what_a_fork_fails_at_is_done_here():
    """With its own fault, whatever that is: a fork that was killed says nothing."""
    here = os.getpid()

    def work():
        if os.getpid() != here:
            os.kill(os.getpid(), 9)
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        in_fork(work)


def test_where_no_process_can_be_forked_it_is_done_here(monkeypatch):
    def no_fork():
        raise BlockingIOError("no number left")

    monkeypatch.setattr(os, "fork", no_fork)
    assert in_fork(lambda: str(os.getpid())) == str(os.getpid())
    monkeypatch.setattr(fork, "CAN_FORK", False)
    assert in_fork(lambda: str(os.getpid())) == str(os.getpid())


def test_an_interruption_reaches_the_fork_which_puts_its_things_in_order(tmp_path, monkeypatch):
    begun, left = tmp_path / "begun", tmp_path / "left"

    def work():
        try:
            begun.touch()
            sleep(600)
        finally:
            left.touch()
        return ""

    def interrupted(*_):
        while not begun.exists():
            sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(fork, "open", interrupted, raising=False)  # no other thread's
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what runs in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            in_fork(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.exists()


def test_output_that_waits_is_written_once(capfd):
    with os.fdopen(os.dup(1), "w") as stream:
        before, sys.stdout = sys.stdout, stream
        try:
            stream.write("waits")
            Fork(lambda: None, is_silent=False).wait()
        finally:
            sys.stdout = before
    assert capfd.readouterr().out == "waits"
