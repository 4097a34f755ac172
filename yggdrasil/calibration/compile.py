"""Compile a pair's steps side by side, in processes of their own.

Each worker loads the pair itself: a package depends on shapes alone, so it fits the caller's models.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

from yggdrasil.calibration.settings import PairSource
from yggdrasil.engine.build import Assembly
from yggdrasil.errors import YggdrasilError

StepName = tuple[str, str, int]  # runner, step, width
_NO_WORKERS = (
    "a process that compiles steps ended early: memory ran out, it was killed, or the calling program has no file or "
    'no line `if __name__ == "__main__":` around what it runs; mend that, or calibrate first with `yggdrasil calibrate`'
)
_assembly: Assembly | None = None


def missing_steps(assembly: Assembly) -> list[StepName]:
    """One step for each package that is not on disk, the target's, which are slow to compile, first."""
    missing: dict[Path, StepName] = {}
    for name, runner in (("target", assembly.target), ("drafter", assembly.drafter)):
        for step, width in runner.defined if runner is not None else ():
            assert runner is not None
            if not runner.is_compiled(step, width):
                missing.setdefault(runner.package(step, width), (name, step, width))
    return list(missing.values())


def compile_missing(
    source: PairSource,
    assembly: Assembly,
    phase: Callable[[str], Callable[[float], None]],
    kinds: Sequence[str] | None = None,
) -> None:
    """Compile what is not on disk yet, only steps of ``kinds`` if given, and report to a phase of that name."""
    steps = [step for step in missing_steps(assembly) if kinds is None or step[1] in kinds]
    if steps:
        report = phase(f"compiling {len(steps)} kinds of steps, once")
        for done, _ in enumerate(compile_steps(source, steps), start=1):
            report(done / len(steps))


def compile_steps(source: PairSource, steps: Sequence[StepName]) -> Iterator[StepName]:
    """Compile ``steps`` on all cores, yielding each when it is on disk. Interrupting keeps what is done.

    Raises:
        YggdrasilError: a worker ended, or could not begin: each imports the caller's main module anew.
    """
    workers = max(1, min(len(steps), os.cpu_count() or 1))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(source,))
    try:
        pending = {pool.submit(_compile, step): step for step in steps}
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                try:
                    future.result()
                except BrokenProcessPool:
                    raise YggdrasilError(_NO_WORKERS) from None
                yield pending.pop(future)
    except BaseException:
        for process in (pool._processes or {}).values():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(source: PairSource) -> None:
    global _assembly  # noqa: PLW0603  (one pair a worker, built once)
    import signal
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    end_with_parent()
    warnings.filterwarnings("ignore")
    from yggdrasil.calibration.pair import build_assembly

    _assembly = build_assembly(source)


def end_with_parent() -> None:
    """Let this worker end as soon as the process that asked for it is gone, however it went."""
    parent = parent_process()
    assert parent is not None, "not a worker"

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def _compile(step: StepName) -> None:
    assert _assembly is not None
    runner = _assembly.target if step[0] == "target" else _assembly.drafter
    assert runner is not None
    runner.compile(step[1], step[2])
