"""Workers compile what is missing, are not needed for it, and do not outlive who asked for them."""

import subprocess
import sys
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest

from yggdrasil.engine import apart

PARENT = """
import os, signal
from yggdrasil.engine import apart

worker = apart.begin({"opening": {"plan": "nowhere"}, "steps": []})
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Runner:
    """Steps by name and width; those in ``compiled`` are on disk."""

    def __init__(self, *defined, compiled=()):
        self.defined, self.compiled = list(defined), set(compiled)

    def package(self, step, width):
        return Path(step if width == 1 else f"{step}-wide")

    def is_compiled(self, step, width):
        return step in self.compiled


def assembly(target, drafter=None):
    return SimpleNamespace(target=target, drafter=drafter)


def test_steps_of_several_rows_are_one_share_and_one_package_is_compiled_once():
    target = Runner(("prefill", 16), ("prefill", 32), ("plain", 1), ("verify", 4), ("kept", 4), compiled=["kept"])
    drafter = Runner(("draft", 4), ("plain", 1))

    assert apart.missing_shares(assembly(target, drafter)) == [
        [("target", "prefill", 16), ("target", "verify", 4)],
        [("target", "plain", 1)],
        [("drafter", "draft", 4)],
    ]


def test_with_nothing_missing_no_worker_begins(monkeypatch):
    monkeypatch.setattr(apart, "begin", None)
    apart.compile_apart(assembly(Runner(("plain", 1), compiled=["plain"])), {}, None)


@pytest.mark.parametrize("worker", ["string", "yggdrasil.engine.compile_worker"])
def test_what_a_worker_cannot_do_is_left_to_others(monkeypatch, worker):
    """One that does nothing, and one whose plan is not there: whoever compiles then says what is wrong."""
    monkeypatch.setattr(apart, "_WORKER", worker)
    reported = []

    apart.compile_apart(assembly(Runner(("plain", 1))), {"plan": "nowhere"}, lambda title: reported.append)
    assert reported[-1] == 1


def test_interrupted_workers_end(monkeypatch):
    begun = []
    monkeypatch.setattr(apart, "_WORKER", "timeit")
    monkeypatch.setattr(apart, "begin", lambda order, begin=apart.begin: begun.append(begin(order)) or begun[-1])

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apart.compile_apart(assembly(Runner(("plain", 1))), {}, lambda title: interrupt)
    assert begun[0].wait(60) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for a process by its number")
def test_a_worker_ends_with_a_caller_that_was_killed():
    """The caller is a program without a file: no worker imports it."""
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=False, timeout=300)
    worker = int(done.stdout)

    for _ in range(600):  # at most a minute
        if not Path(f"/proc/{worker}").exists():
            return
        sleep(0.1)
    pytest.fail(f"the worker {worker} lives on")
