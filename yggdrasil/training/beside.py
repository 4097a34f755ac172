"""Trains a head in a low-priority process beside a decoder; the process ends with the decoder's, if not earlier.

    python -m yggdrasil.training.beside TARGET OUT

The training reads the answers that ``OUT.training/answers.jsonl`` holds at its start, and the shipped answers.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from yggdrasil.artifacts import model_fingerprint, shown
from yggdrasil.drafters.statistics.table_files import NICENESS
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError, first_line
from yggdrasil.training.publish import is_free
from yggdrasil.training.settings import TrainSettings
from yggdrasil.training.training import check_out, train

_CHILDREN: list["subprocess.Popen[bytes]"] = []  # a child process ends when the pipe to its stdin is closed


class Started(NamedTuple):
    """A training that runs beside a decoder."""

    process: int  # process id
    log: Path  # file with the training's output
    is_unmeasured: bool  # ``out`` has an earlier training's head that the decoder's plan has not considered
    drafts: bool = False  # the decoder drafts with an earlier training's head in ``out``


def start_training(decoder: Decoder, out: Path) -> Started:
    """Start a process that trains a head for the decoder's target and writes it to the folder ``out``.

    The decoder then appends its answers to ``OUT.training/answers.jsonl``, for the next training.

    Raises:
        YggdrasilError: the decoder has no plan; ``out`` is a file, has files of another origin, or has the head with
            which the decoder's calibrated plan drafts; or no process can be started.
    """
    plan = decoder.plan
    if plan is None:
        raise YggdrasilError("a decoder without a plan names no target to train for; open a model or a plan")
    settings = TrainSettings(plan.target.path(), out.absolute())
    check_out(settings.out)
    head = None if is_free(settings.out) else model_fingerprint(settings.out)
    drafts = head is not None and plan.drafter is not None and plan.drafter.fingerprint == head
    if drafts and not plan.is_provisional:  # the plan would no longer load
        raise YggdrasilError(f"{shown(out)} holds the head that the plan drafts with; train in another folder")
    log = settings.work / "log.txt"
    try:
        settings.work.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as lines:
            child = subprocess.Popen(
                [sys.executable, "-m", __name__, settings.target, str(settings.out)], stdin=subprocess.PIPE,
                stdout=lines, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise YggdrasilError(f"no training can run in {shown(settings.work)}: {first_line(error)}") from error
    _CHILDREN.append(child)
    decoder.keep_answers(settings.answers)
    left_out = None if plan.left_out is None else plan.left_out.drafter.fingerprint
    return Started(child.pid, log, is_unmeasured=not drafts and head not in (None, left_out), drafts=drafts)


class _Log:
    """A ``Teller`` that prints lines; its progress report raises KeyboardInterrupt once ``ended`` is set."""

    def __init__(self, ended: Event) -> None:
        self._ended = ended

    def phase(self, title: str) -> Callable[[float], None]:
        self.tell(title)
        return self._report

    def _report(self, _: float) -> None:
        if self._ended.is_set():
            raise KeyboardInterrupt

    def tell(self, line: str) -> None:
        print(line, flush=True)  # noqa: T201


def _end_with_parent(ended: Event) -> None:
    """Wait until the parent process has ended, then interrupt this process, which saves the training's state.

    Python ignores an interrupt that arrives in the callback of a weak reference, such as imports use. In that case
    ``ended``, which this function sets, ends the training.
    """
    sys.stdin.buffer.read()
    ended.set()
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    parent_ended = Event()
    log_lines = _Log(parent_ended)
    try:
        Thread(target=_end_with_parent, args=(parent_ended,), daemon=True).start()
        train(TrainSettings(sys.argv[1], Path(sys.argv[2]), threads=1, is_beside_use=True), log_lines)
    except YggdrasilError as problem:
        log_lines.tell(str(problem))
    except KeyboardInterrupt:
        log_lines.tell("interrupted; the next start goes on")
