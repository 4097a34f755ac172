"""Steps compiled side by side, in processes forked from this one.

Tracing and compiling take more memory than decoding, which a process does not give back; and steps that share nothing
need not wait for one another. A fork has the models and all that was imported already. It is help alone: what it leaves
undone is compiled here, where one also learns what was wrong.
"""

import gc
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import sleep

from yggdrasil.artifacts.fork import CAN_FORK, Fork
from yggdrasil.engine.assembly import Assembly, Phase
from yggdrasil.runtime.runner import ModelRunner

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
    if CAN_FORK:
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
    """Do all ``works`` in processes of their own, as many at once as there are cores, until one gives up.

    None outlives the call.
    """
    waiting, running = list(works), list[Fork]()
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(Fork(partial(_rarely_collecting, waiting.pop(0))))
            sleep(_LOOK_S)
            ended = [fork for fork in running if fork.has_ended()]
            running = [fork for fork in running if fork not in ended]
            if any(fork.has_given_up for fork in ended):
                return
            report(1 - (len(waiting) + len(running)) / len(works))
    except OSError:  # no memory or no number left for another process
        return
    finally:
        for fork in running:
            fork.end()


def _rarely_collecting(work: Callable[[], None]) -> None:
    """Graphs are many objects that live on: looking through them for garbage is a tenth of tracing them."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    work()
