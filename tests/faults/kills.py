"""SIGKILL at random moments of a calibration: the next run goes on from what was complete.

A row begins without the plan; up to three runs are killed, and one goes to its end. What was complete when a run was
killed must be as it was when the next one is over or killed too.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from uuid import uuid4

from stage import Stage, generate

from yggdrasil.artifacts import read_csv

ROOT = Path(__file__).resolve().parents[2]
NAME = "killed"
CALIBRATE = [
    "calibrate", "--quick", "target", "--drafter", "ngram", "--prompts", "prompts.jsonl", "--name", NAME,
    "--root", ".", "--dtype", "float32", "--max-length", "200", "--max-depth", "4",
    "--verify-widths", "1,4", "--target-threads", "1",
]  # fmt: skip
COMMANDS = {"calibrate --quick": CALIBRATE}
_MARK = "YGGDRASIL_FAULTS"
_LINGER_SECONDS = 15.0  # in which workers notice that nobody waits for them


@dataclass
class Tally:
    """What came of a command's kills."""

    kills: int = 0
    completed: int = 0  # runs behind a kill that went to their end
    kept: int = 0  # complete parts that a later run found
    wrong: list[str] = field(default_factory=list)


class Killing:
    """One sandbox that is killed again and again."""

    program = "from yggdrasil.cli import main; main()"

    def __init__(self, stage: Stage, random: Random) -> None:
        self._folder = stage.sandbox("killed")
        self._environment = {**os.environ, **stage.machine_made(self._folder), "HF_HUB_OFFLINE": "1"}
        self._environment |= {"PYTHONPATH": str(ROOT)}
        self._reference = list(stage.reference.values())
        self._random = random

    def run(self, title: str, number: int, report: Callable[[str], None]) -> Tally:
        """Kill the command ``number`` times, a few times in a row, and have it go to its end after each row."""
        tally, lasts = Tally(), 0.0  # seconds that a run takes
        while tally.kills < number:
            self._forget()
            in_a_row = min(self._random.randint(1, 3), number - tally.kills) if lasts else 0
            moments = [self._random.uniform(0.0, lasts) for _ in range(in_a_row)]
            before = len(tally.wrong)
            lasts = max(lasts, self._row(title, moments, tally))
            for wrong in tally.wrong[before:]:
                report(f"{title}: {wrong}")
            report(f"{title}: killed {tally.kills} times, {len(tally.wrong)} wrong")
        return tally

    def _row(self, title: str, moments: Sequence[float], tally: Tally) -> float:
        """Kill at each of the moments, then let a run go to its end; a run that is over sooner is the last.

        Returns what the last run took, in seconds.
        """
        command = COMMANDS[title]
        before: dict[str, str] = {}
        for moment in (*moments, None):
            start = time.monotonic()
            ended, code, left = self._start(command, moment)
            took = time.monotonic() - start
            found = self._complete()
            # Once there is a plan the unfinished work goes.
            is_over = ended or (self._folder / "plans" / NAME).exists()
            lost = sorted(name for name in before if found.get(name, before[name] if is_over else "") != before[name])
            tally.wrong += [f"made twice: {name}" for name in lost] + left
            tally.kept += len(before)
            # Killed behind its plan it was done: the next one measures anew, as whoever calls it twice asks.
            before = {name: made for name, made in found.items() if not is_over}
            if ended:
                tally.completed += 1
                tally.wrong += [f"exit code {code}"] if code else [*self._leftovers(), *self._other_tokens()]
                break
            tally.kills += 1
        return took

    def _forget(self) -> None:
        """The plan and all that was learned for it."""
        for kind in ("plans", "predictors", "profiles"):
            shutil.rmtree(self._folder / kind / NAME, ignore_errors=True)

    def _start(self, command: list[str], moment: float | None) -> tuple[bool, int | None, list[str]]:
        """Run until the end or ``moment``; whether it ended by itself, its exit code, and what went on behind it."""
        mark = uuid4().hex
        said = self._folder / "stdout.txt"  # no pipe, which a worker that goes on would keep open
        with said.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", self.program, *command], cwd=self._folder,
                env={**self._environment, _MARK: mark}, stdout=out, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            code = process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return False, None, _lingering(mark)
        self._out = said.read_text()
        return True, code, _lingering(mark)

    def _complete(self) -> dict[str, str]:
        """Digests of the parts of an unfinished calibration that count as done."""
        found = {}
        for part in self._folder.glob(f"profiles/{NAME}/*.partial/*"):
            if not part.name.startswith("."):
                found[part.name] = hashlib.sha256(part.read_bytes()).hexdigest()
        for table in self._folder.glob(f"profiles/{NAME}/*/threads.csv"):
            found[table.name] = hashlib.sha256(table.read_bytes()).hexdigest()
        for table in self._folder.glob(f"profiles/{NAME}/*/stage_samples.csv"):
            context = int(read_csv(table, "stage-samples", 1)["context"].iloc[0])  # one, so its table is the whole
            found[f"stages-{context}.csv"] = hashlib.sha256(table.read_bytes()).hexdigest()
        return found

    def _leftovers(self) -> Iterator[str]:
        for path in self._folder.rglob("*"):
            if path.suffix in (".tmp", ".partial", ".lock", ".old") or path.name.startswith("tmp"):
                yield f"left over: {path.relative_to(self._folder)}"

    def _other_tokens(self) -> list[str]:
        _, code, _ = self._start(generate(NAME, "--prompts", "prompts.jsonl"), None)
        if code:
            return [f"the plan that was made: exit code {code}"]
        made = [json.loads(line)["tokens"] for line in self._out.splitlines()]
        return [] if made == self._reference else ["different tokens"]


def _lingering(mark: str) -> list[str]:
    """Processes of a run that are still there a while after it, killed now."""
    end = time.monotonic() + _LINGER_SECONDS
    while (left := list(_processes(mark))) and time.monotonic() < end:
        time.sleep(0.2)
    for process in left:
        os.kill(process, signal.SIGKILL)
    return [f"process {process} went on" for process in left]


def _processes(mark: str) -> Iterator[int]:
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                if f"{_MARK}={mark}".encode() in (place / "environ").read_bytes():
                    yield int(place.name)
            except OSError:
                continue
