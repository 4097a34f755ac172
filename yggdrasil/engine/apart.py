"""Steps of a decoder compiled apart: in processes of their own, side by side.

Tracing and compiling take more memory than decoding, which a process does not give back; and steps that share nothing
need not wait for one another. A worker (``compile_worker``) opens the same decoder and compiles a share. It is help
alone: what it leaves undone is compiled by whoever needs it, who also learns what was wrong.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM
from time import sleep
from typing import Any

import yggdrasil
from yggdrasil.engine.build import Assembly, Phase

StepName = tuple[str, str, int]  # runner, step, width
_WORKER = "yggdrasil.engine.compile_worker"
_LOOK_S = 0.1  # between looks at who has ended


def compile_apart(assembly: Assembly, opening: Mapping[str, Any], phase: Phase) -> None:
    """Compile what ``assembly`` lacks, as far as workers can; ``opening`` is what opens the same decoder there."""
    waiting = missing_shares(assembly)
    if not waiting:
        return
    report, total = phase(f"compiling {sum(map(len, waiting))} kinds of steps, once"), len(waiting)
    running: list[subprocess.Popen[str]] = []
    try:
        while waiting or running:
            if waiting and len(running) < (os.cpu_count() or 1):
                running.append(begin({"opening": opening, "steps": waiting.pop(0)}))
                continue
            sleep(_LOOK_S)
            running = [worker for worker in running if worker.poll() is None]
            report(1 - (len(waiting) + len(running)) / total)
    finally:
        for worker in running:
            end(worker)


def missing_shares(assembly: Assembly) -> list[list[StepName]]:
    """A step for each package that is not on disk: those of several rows together, which may share their layers.

    Steps of one row share nothing: their layers are unrolled.
    """
    shares: dict[tuple[str, str | None], list[StepName]] = {}
    seen: set[Path] = set()
    for name, runner in (("target", assembly.target), ("drafter", assembly.drafter)):
        for step, width in runner.defined if runner is not None else ():
            assert runner is not None
            package = runner.package(step, width)
            if package not in seen and not runner.is_compiled(step, width):
                shares.setdefault((name, step if width == 1 else None), []).append((name, step, width))
            seen.add(package)
    return list(shares.values())


def begin(order: Mapping[str, Any]) -> subprocess.Popen[str]:
    """A worker that carries out ``order``; it ends when the pipe that it was told by does, so with this process."""
    package = str(Path(yggdrasil.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    worker = subprocess.Popen(
        [sys.executable, "-m", _WORKER],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # Ctrl-C is for this process, which ends its workers
    )  # fmt: skip
    assert worker.stdin is not None
    with suppress(OSError):  # it ended at once
        worker.stdin.write(json.dumps(order) + "\n")
        worker.stdin.flush()
    return worker


def end(worker: subprocess.Popen[str]) -> None:
    """End a worker and the compiler that it may be waiting for."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, SIGTERM) if hasattr(os, "killpg") else worker.terminate()
    worker.communicate()
