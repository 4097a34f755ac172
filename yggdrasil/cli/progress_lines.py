"""Progress where standard error is no terminal: a line now and then."""

import sys
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic

EVERY = 10.0  # seconds between two lines
FIRST = 1.0  # seconds after which a phase prints its first line


class ProgressLines:
    """Writes a line about the current phase, at most one every ``every`` seconds; short phases say nothing.

    A thread of its own writes, since a phase may compute for minutes before it reports.
    """

    def __init__(self, every: float = EVERY, first: float = FIRST) -> None:
        self._every, self._first = every, first
        self._title, self._fraction, self._began, self._last = "", 0.0, 0.0, -every
        self._ends: Event | None = None

    def phase(self, title: str) -> Callable[[float], None]:
        """Begin a phase and return where its fraction is reported."""
        self._title, self._fraction, self._began = title, 0.0, monotonic()
        if self._ends is None:
            self._ends = Event()
            Thread(target=self._tick, args=(self._ends,), daemon=True).start()

        def report(fraction: float) -> None:
            if self._title == title:
                self._fraction = fraction

        return report

    def close(self) -> None:
        """No phase runs, until another begins."""
        if self._ends is not None:
            self._ends.set()
            self._ends = None

    def _tick(self, ends: Event) -> None:
        while not ends.wait(self._wait()):
            if self._fraction < 1.0 and self._is_due(now := monotonic()):
                self._last = now
                self._write(now - self._began)

    def _wait(self) -> float:
        return min(self._every, self._first) / 2

    def _is_due(self, now: float) -> bool:
        return now - self._last >= self._every and now - self._began >= self._first

    def _write(self, seconds: float) -> None:
        done = f", {self._fraction:.0%}" if self._fraction else ""
        print(f"yggdrasil: {self._title}: {seconds:.0f} s{done}", file=sys.stderr, flush=True)
