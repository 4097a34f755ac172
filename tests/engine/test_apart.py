"""What is missing is compiled in forks, which are not needed for it and do not outlive who asked for them."""

import os
import subprocess
import sys
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest

from yggdrasil.engine import apart
from yggdrasil.errors import YggdrasilError

FORKS = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
PARENT = """
import os, signal, subprocess
from yggdrasil.artifacts.fork import Fork

fork = Fork(lambda: subprocess.run(["sleep", "600"]))
print(fork.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Runner:
    """Steps by name and width, whose packages are files of ``folder``."""

    def __init__(self, folder, *defined, compiled=(), broken=()):
        self.folder, self.defined, self.broken = folder, list(defined), broken
        for step in compiled:
            self.package(step, 2).touch()

    def package(self, step, width):
        return self.folder / (step if width == 1 else f"{step}-wide")

    def is_compiled(self, step, width):
        return self.package(step, width).exists()

    def compile(self, step, width):
        if step in self.broken:
            raise YggdrasilError(f"{step} cannot be compiled")
        self.package(step, width).write_text(str(os.getpid()))


def assembly(target, drafter=None):
    return SimpleNamespace(target=target, drafter=drafter)


def test_steps_of_several_rows_are_one_share_and_one_package_is_compiled_once(tmp_path):
    steps = [("prefill", 16), ("prefill", 32), ("plain", 1), ("verify", 4), ("kept", 4)]
    target = Runner(tmp_path, *steps, compiled=["kept"])
    (tmp_path / "drafter").mkdir()
    drafter = Runner(tmp_path / "drafter", ("draft", 4), ("plain", 1))

    assert apart.missing_shares(assembly(target, drafter)) == [
        [("target", "prefill", 16), ("target", "verify", 4)],
        [("target", "plain", 1)],
        [("drafter", "draft", 4)],
        [("drafter", "plain", 1)],
    ]
    assert apart.missing_shares(assembly(target, drafter), ["verify"]) == [[("target", "verify", 4)]]


def test_with_nothing_missing_nothing_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(apart, "Fork", None)
    apart.compile_missing(assembly(Runner(tmp_path, ("plain", 2), compiled=["plain"])), None)


@FORKS
def test_every_share_has_a_process_of_its_own(tmp_path):
    target, reported = Runner(tmp_path, ("prefill", 4), ("verify", 4), ("plain", 1)), []
    apart.compile_missing(assembly(target), lambda title: reported.append)

    who = {step: int(target.package(step, width).read_text()) for step, width in target.defined}
    assert who["prefill"] == who["verify"]
    assert len({os.getpid(), *who.values()}) == 3
    assert reported[-1] == 1


def test_what_a_fork_leaves_undone_is_compiled_here(tmp_path, monkeypatch):
    """And what is wrong is said here."""
    monkeypatch.setattr(apart, "_in_forks", lambda works, report: None)
    target = Runner(tmp_path, ("plain", 1), ("verify", 4))
    apart.compile_missing(assembly(target), lambda title: lambda share: None)

    assert target.package("verify", 4).read_text() == str(os.getpid())
    with pytest.raises(YggdrasilError, match="draft cannot be compiled"):
        apart.compile_missing(
            assembly(Runner(tmp_path, ("draft", 1), broken=["draft"])), lambda title: lambda share: None
        )


@FORKS
def test_a_step_that_cannot_be_compiled_is_said_after_the_others_are(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # of one core's, the other would not have begun
    target = Runner(tmp_path, ("plain", 1), ("verify", 4), broken=["plain"])
    with pytest.raises(YggdrasilError, match="plain cannot be compiled"):
        apart.compile_missing(assembly(target), lambda title: lambda share: None)

    assert target.is_compiled("verify", 4)


@FORKS
def test_interrupted_forks_end(tmp_path, monkeypatch):
    begun, fork = [], apart.Fork
    monkeypatch.setattr(apart, "Fork", lambda _: begun.append(fork(lambda: sleep(600))) or begun[-1])
    monkeypatch.setattr(apart, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        apart.compile_missing(assembly(Runner(tmp_path, ("plain", 1))), lambda title: lambda share: None)
    assert not Path(f"/proc/{begun[0].pid}").exists()


@FORKS
def test_a_fork_ends_with_a_caller_that_was_killed():
    """And so does the program that it was waiting for."""
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=False, timeout=300)
    fork = int(done.stdout)

    def lives(process):
        try:
            stat = (process / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # others of the machine end while they are looked at
            return False
        return int(stat.rpartition(")")[2].split()[3]) == fork  # of its session

    for _ in range(600):  # at most a minute
        if not any(lives(process) for process in Path("/proc").glob("[0-9]*")):
            return
        sleep(0.1)
    pytest.fail(f"the fork {fork} lives on")


@FORKS
def test_where_one_fork_gives_up_the_others_do_not_begin(tmp_path, monkeypatch):
    """A full disk is said after one step, not after all."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    target = Runner(tmp_path, ("draft", 1), ("verify", 4), broken=["draft"])

    with pytest.raises(YggdrasilError, match="draft cannot be compiled"):
        apart.compile_missing(assembly(target), lambda title: lambda share: None)
    assert not target.package("verify", 4).exists()
