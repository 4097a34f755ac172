"""Steps compiled side by side, in processes forked from this one.

Tracing and compiling take more memory than decoding, which a process does not give back; and steps that share nothing
need not wait for one another. A fork has the models and all that was imported already. It is help alone: what it leaves
undone is compiled here, where one also learns what was wrong. Only Linux forks a process with threads safely enough;
elsewhere everything is compiled here.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import sleep

import torch

from yggdrasil.engine.build import Assembly, Phase
from yggdrasil.models.runner import ModelRunner

StepName = tuple[str, str, int]  # runner, step, width
_LOOK_S = 0.05  # between looks at who has ended


def compile_missing(assembly: Assembly, phase: Phase, kinds: Sequence[str] | None = None) -> None:
    """Compile to disk what is not there yet, only steps of ``kinds`` if given, and report to a phase of that name.

    Interrupting keeps what is done.

    Raises:
        YggdrasilError: a step that cannot be compiled.
    """
    shares = missing_shares(assembly, kinds)
    if not shares:
        return
    report = phase(f"compiling {sum(map(len, shares))} kinds of steps, once")
    if sys.platform == "linux":
        _in_forks([_compiler(assembly, share) for share in shares], report)
    for share in missing_shares(assembly, kinds):
        _compiler(assembly, share)()
    report(1.0)


def missing_shares(assembly: Assembly, kinds: Sequence[str] | None = None) -> list[list[StepName]]:
    """A step for each package that is not on disk: those of several rows together, which may share their layers.

    Steps of one row share nothing: their layers are unrolled.
    """
    shares: dict[tuple[str, str | None], list[StepName]] = {}
    seen: set[Path] = set()
    for name in ("target", "drafter"):
        runner = _runner(assembly, name)
        for step, width in runner.defined if runner is not None else ():
            assert runner is not None
            package = runner.package(step, width)
            is_wanted = kinds is None or step in kinds
            if is_wanted and package not in seen and not runner.is_compiled(step, width):
                shares.setdefault((name, step if width == 1 else None), []).append((name, step, width))
            seen.update([package] if is_wanted else [])
    return list(shares.values())


def _runner(assembly: Assembly, name: str) -> ModelRunner | None:
    return assembly.target if name == "target" else assembly.drafter


def _compiler(assembly: Assembly, share: Sequence[StepName]) -> Callable[[], None]:
    """Compiles the steps of a share, one after the other."""

    def compile_all() -> None:
        for name, step, width in share:
            runner = _runner(assembly, name)
            assert runner is not None
            runner.compile(step, width)

    return compile_all


def _in_forks(works: Sequence[Callable[[], None]], report: Callable[[float], None]) -> None:
    """Do all ``works`` in processes of their own, as many at once as there are cores; none outlives the call."""
    waiting, running = list(works), list[Fork]()
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(Fork(waiting.pop(0)))
            sleep(_LOOK_S)
            running = [fork for fork in running if not fork.has_ended()]
            report(1 - (len(waiting) + len(running)) / len(works))
    except OSError:  # no memory or no number left for another process
        return
    finally:
        for fork in running:
            fork.end()


class Fork:
    """A process that does one piece of work and ends, without a word, whatever became of it.

    It ends with this process too, however that went, and takes the compiler that it may be waiting for with it.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        ours, self._held = os.pipe()  # the other end closes with this process
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads here: they hold nothing that a fork needs
            self.pid = os.fork()
        if not self.pid:
            os.close(self._held)
            _live(work, ours)
        os.close(ours)
        self._has_ended = False

    def has_ended(self) -> bool:
        """Whether the work is done, or given up."""
        if not self._has_ended and os.waitpid(self.pid, os.WNOHANG)[0]:
            self._close()
        return self._has_ended

    def end(self) -> None:
        """Now."""
        if not self._has_ended:
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or has no group of its own yet
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._close()

    def _close(self) -> None:
        os.close(self._held)
        self._has_ended = True


def _live(work: Callable[[], None], caller: int) -> None:
    """The life of a fork. ``caller`` is a pipe that ends when the process does that asked for it."""
    try:
        os.setsid()  # Ctrl-C is for the caller, who ends it
        Thread(target=_end_with, args=(caller,), daemon=True).start()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # the threads of the caller's pools are not here
        work()
    except BaseException:  # noqa: BLE001  (whoever compiles it then says what is wrong)
        os._exit(1)
    os._exit(0)


def _end_with(caller: int) -> None:
    os.read(caller, 1)
    os.killpg(0, signal.SIGKILL)
