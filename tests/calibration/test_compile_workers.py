"""Workers do not outlive who asked for them, and are missed where they end early."""

import os
import subprocess
import sys
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from time import sleep

import pytest

from yggdrasil.calibration import compile as compiling
from yggdrasil.errors import YggdrasilError

PARENT = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from yggdrasil.calibration.compile import end_with_parent

if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for a process by its number")
def test_a_worker_ends_with_a_parent_that_was_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    worker = int(done.stdout)

    for _ in range(600):  # at most a minute
        if not os.path.exists(f"/proc/{worker}"):  # noqa: PTH110
            return
        sleep(0.1)
    pytest.fail(f"the worker {worker} lives on")


class _DeadWorkers(Executor):
    """Workers that end before they have done anything."""

    _processes = None

    def __init__(self, *_, **__):
        pass

    def submit(self, *_):
        future = Future()
        future.set_exception(BrokenProcessPool("a process ended"))
        return future

    def shutdown(self, **_):
        pass


def test_workers_that_cannot_begin_are_a_sentence(monkeypatch):
    """So it is where a program without a file, or without a guard around what it runs, needs steps compiled."""
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", _DeadWorkers)

    with pytest.raises(YggdrasilError, match=r"ended early: .* `if __name__ == .* calibrate first"):
        list(compiling.compile_steps(None, [("target", "plain", 1)]))
