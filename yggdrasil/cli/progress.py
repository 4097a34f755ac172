"""Progress and tables on the terminal. Rich, whose import takes long, is imported when it first shows something."""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from yggdrasil.bench.spread import describe

EVERY = 10.0  # minimum seconds between two printed lines
FIRST = 1.0  # seconds after which a phase prints its first line


class ProgressLines:
    """Prints lines about the current phase to standard error, at most one every ``every`` seconds.

    Phases shorter than ``first`` seconds print nothing. A thread prints the lines, because a phase may compute for
    minutes before it reports progress.
    """

    def __init__(self, every: float = EVERY, first: float = FIRST) -> None:
        self._every, self._first = every, first
        self._title, self._fraction, self._began, self._last = "", 0.0, 0.0, -every
        self._ends: Event | None = None

    def phase(self, title: str) -> Callable[[float], None]:
        """Begin a phase called ``title``, which ends the one before; return a function that takes the fraction done.

        Fractions are 0 to 1. A thread prints lines, beginning after ``first`` seconds, until 1 is reported.
        """
        self._title, self._fraction, self._began = title, 0.0, monotonic()
        if self._ends is None:
            self._ends = Event()
            Thread(target=self._tick, args=(self._ends,), daemon=True).start()

        def report(fraction: float) -> None:
            if self._title == title:
                self._fraction = fraction

        return report

    def close(self) -> None:
        """Stop printing lines on the current phase, until another begins."""
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


def with_progress(request: "Request") -> Iterator[str]:
    """Yield the pieces of a request's text. During a long prefill, print lines of progress to standard error."""
    lines = ProgressLines()
    report = lines.phase("reading the prompt")
    try:
        for piece in request:
            if request.tokens:
                lines.close()
            report(request.prefilled_share)
            yield piece
    finally:
        lines.close()


if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from yggdrasil.bench.compare import Comparison
    from yggdrasil.bench.memory import MemoryUse
    from yggdrasil.engine.request import Request


@cache
def _console() -> "Console":
    from rich.console import Console

    return Console(stderr=True)


class PhaseProgress:
    """Shows one progress bar per phase, with elapsed and estimated remaining time.

    If standard error is not a terminal, it prints lines instead (``ProgressLines``).
    """

    def __init__(self) -> None:
        self._lines = None if sys.stderr.isatty() else ProgressLines()
        self._shown: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing progress bars or printing lines, until another phase begins."""
        if self._lines is not None:
            self._lines.close()
        if self._shown is not None and self._shown.live.is_started:
            self._shown.stop()

    def phase(self, title: str) -> Callable[[float], None]:
        """Begin a phase called ``title``, and return a function that takes the fraction done, 0 to 1."""
        if self._lines is not None:
            return self._lines.phase(title)
        if self._shown is None:
            self._shown = _bars()
        bars = self._shown
        bars.start()
        task = bars.add_task(title, total=1.0)
        return lambda fraction: bars.update(task, completed=fraction)

    def tell(self, line: str) -> None:
        """Print ``line`` to standard error, above the progress bars if there are any."""
        _console().print(line, highlight=False, soft_wrap=True, markup=False)


def _bars() -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description:<48}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=_console(),
    )  # fmt: skip


def show_comparison(result: "Comparison") -> None:
    """Print one line about a prompt that was decoded with a plan and plainly, to standard error.

    The line has the milliseconds per token of both ways, their ratio, AAL, the share of repeated tokens, and whether
    the tokens are the same.
    """
    tree, plain = result.tree.metrics, result.plain.metrics
    same = "same tokens" if result.divergence is None else f"DIFFERENT TOKENS ({result.divergence.verdict})"
    ratio = f"{result.decode_ratio:5.2f}" if tree.iterations else f"{'-':>5}"  # the first token is the prefill's
    _console().print(
        f"{result.id:<28.28} plain {plain.tpot_ms:7.3f} ms  tree {tree.tpot_ms:7.3f} ms  {ratio} x  "
        f"AAL {tree.aal:4.2f}  repeats {result.repeated_share:4.0%}  {same}",
        markup=False, soft_wrap=True,
    )  # fmt: skip


_FIGURES = {  # names in ``bench.summary.summarise`` -> labels in the table
    "matched": "prompts with the tokens of plain decoding",
    "verify_decode_mismatches": "prompts with other tokens",
    "faults": "of these, not explained by rounding",
    "aal": "tokens per target pass (AAL)",
    "proposed": "drafted tokens that were verified",
    "accepted": "drafted tokens that were accepted",
    "acceptance_rate": "share accepted",
    "tpot_ms": "ms per token, median of the prompts",
    "baseline_tpot_ms": "ms per token, plain decoding",
    "predicted_tpot_ms": "ms per token, predicted",
    "speedup": "speed-up, median of the prompts",
    "total_speedup": "speed-up, all prompts together",
    "repeats": "share of tokens that repeat their text",
    "end_to_end_speedup": "speed-up with the time of the prompt",
    "predicted_speedup": "measured plain time over predicted time",
    "overhead_share": "share of time outside the models",
    "plain_overhead_share": "the same in plain decoding",
}


def show_summary(summary: dict[str, Any]) -> None:
    """Print a table of the figures that compare a plan with plain decoding, one row for each, to standard output.

    Args:
        summary: result of ``bench.summary.summarise``.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", title="Yggdrasil and plain decoding")
    for name, value in summary.items():
        if isinstance(value, dict):
            text = f"{describe(value, 3)}{'' if 'samples' in value else ', quartiles'}"
        elif isinstance(value, float):
            text = f"{value:.4g}"
        else:
            text = str(value)
        table.add_row(_FIGURES.get(name, name), text)
    Console().print(table)


def show_categories(categories: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table that compares decoding with a plan to plain decoding, one row for each category of prompts.

    Args:
        categories: result of ``bench.summary.summarise_categories``.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table("category", "same tokens", "AAL", "plain ms", "ours ms", "speed-up (quartiles)", "in all", "repeats")
    for name, summary in categories.items():
        table.add_row(
            escape(name),
            f"{summary['matched']} of {summary['prompts']}",
            f"{summary['aal']:.2f}",
            f"{summary['baseline_tpot_ms']:.3f}",
            f"{summary['tpot_ms']:.3f}",
            describe(summary["speedup"]),
            f"{summary['total_speedup']:.2f}",
            f"{summary['repeats']:.0%}",
        )
    wide_console().print(table)


def show_beside(first: str, summary: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table that compares several plans on the same prompts, one row per plan.

    Args:
        first: name of the first plan.
        summary: figures of the first plan, a result of ``bench.summary.summarise``.
        others: figures of the further plans by name, a result of ``bench.summary.summarise_beside``.
    """
    from rich.table import Table

    columns = ("plan", "same tokens", "AAL", "ms per token", "speed-up", "in all", f"time over {first}", "in all")
    table = Table(*columns)
    for name, row in [(first, summary), *others.items()]:
        over = row.get("time_over_first")
        table.add_row(
            name,
            f"{row['matched']} of {row['prompts']}",
            f"{row['aal']:.2f}",
            f"{row['tpot_ms']:.3f}",
            describe(row["speedup"]),
            f"{row['total_speedup']:.2f}",
            describe(over) if over else "1",
            f"{row['total_time_over_first']:.3f}" if over else "1",
        )
    wide_console().print(table)


def show_memory(use: "MemoryUse") -> None:
    """Print one line about the memory that models, caches and imports take, in MB, to standard error."""
    _console().print(
        f"memory: {use.peak:.0f} MB at the peak beyond {use.imports:.0f} MB of imports, {use.ratio:.2f} x the models' "
        f"weights ({use.weights:.0f} MB) and caches ({use.caches:.0f} MB)"
    )


def wide_console() -> "Console":
    """Return a rich console on standard output. A pipe gets a width of 180, so that no number is cut."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=180)
