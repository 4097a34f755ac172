"""Trains a head in a process of low priority beside a decoder of the same target. It ends with the decoder's process.

    python -m yggdrasil.training.beside TARGET OUT

It learns from the answers that ``OUT.training/answers.jsonl`` holds when it starts, and from the shipped answers.
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

_CHILDREN: list["subprocess.Popen[bytes]"] = []  # a child ends when the pipe to it is closed


class Started(NamedTuple):
    """A training that runs beside a decoder."""

    process: int
    log: Path
    is_unmeasured: bool  # an earlier training left a head that the decoder's plan has not considered
    drafts: bool = False  # the decoder drafts with the head of an earlier training


def start_training(decoder: Decoder, out: Path) -> Started:
    """Train a head for the decoder's target in ``out``, in a process of its own, and keep later answers to learn from.

    Raises:
        YggdrasilError: the decoder has no plan, ``out`` is a file or has files of another origin or the head that the
            decoder's calibrated plan drafts with, or no process can be started.
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
    """A teller that prints lines, and interrupts the training at its next progress report once ``ended`` is set."""

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
    """Wait until the parent has ended, then interrupt this process, which stores its state.

    Python ignores an interrupt that arrives in the callback of a weak reference, as imports have them. ``ended`` then
    ends the training.
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
