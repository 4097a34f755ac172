"""What one iteration costs, as measured: passes of the target by width, draft steps, what lies between them.

All times are milliseconds. No torch import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from yggdrasil.tree.shape import TreeShape

# A pass reads and computes at once: it takes what the longer of them takes, and more where both take as long. This is
# the p of their p-norm, by passes of 1 to 16 rows in seconds of fast and of slow memory.
OVERLAP = 5.0
_TELLING = 1.15  # times a row's pass, from which on a pass tells how long it computes


def lower_envelope(measured: Mapping[int, float]) -> dict[int, tuple[float, int]]:
    """Map each width to the cheapest way to run it: (milliseconds, compiled width that serves it, padded).

    Costs are not assumed monotone: a width whose own graph is slower than a wider one is served by the wider one.
    Ties go to the narrower graph. Raises ValueError on an empty table or a cost that is not positive.
    """
    faults = _positive_faults("measured", measured)
    if faults:
        raise ValueError("; ".join(faults))
    envelope: dict[int, tuple[float, int]] = {}
    best_ms, best_width = float("inf"), 0
    for width in sorted(measured, reverse=True):
        if measured[width] <= best_ms:
            best_ms, best_width = measured[width], width
        envelope[width] = (best_ms, best_width)
    return dict(sorted(envelope.items()))


@dataclass(frozen=True)
class StepCosts:
    """Measured costs of one decode iteration.

    ``verify_ms`` is already the lower envelope (see ``lower_envelope``), so it never falls as the width grows.
    ``head_ms`` is the first draft step, which also reads the bonus token; the other ``depth - 1`` cost ``draft_ms``
    (empty where no pass drafts).
    ``plain_ms`` is a whole step without speculation, its own overhead included. ``free_overhead_ms`` is that of an
    iteration whose guesses cost no pass, where others draft too. ``reading_ms`` is what the drafter takes for each
    token that it has not drafted through: the prompt's, and those that other guesses went past.
    """

    head_ms: float
    draft_ms: dict[int, float]  # draft width -> one draft step
    verify_ms: dict[int, float]  # verify width -> one target step
    overhead_ms: float
    plain_ms: float
    free_overhead_ms: float | None = None
    reading_ms: float = 0.0

    def __post_init__(self) -> None:
        faults = _positive_faults("draft_ms", self.draft_ms) if self.draft_ms else []
        faults += _positive_faults("verify_ms", self.verify_ms)
        faults += [
            f"{name} must not be negative, got {value}"
            for name in ("head_ms", "overhead_ms", "free_overhead_ms", "reading_ms")
            if (value := getattr(self, name)) is not None and not 0.0 <= value < float("inf")
        ]
        if not 0.0 < self.plain_ms < float("inf"):
            faults.append(f"plain_ms must be positive, got {self.plain_ms}")
        if 1 not in self.verify_ms:
            faults.append(f"verify_ms needs width 1 (the speedup is relative to it), got {sorted(self.verify_ms)}")
        ordered = [self.verify_ms[width] for width in sorted(self.verify_ms)]
        if ordered != sorted(ordered):
            faults.append(f"verify_ms falls as the width grows ({ordered}): pass it through lower_envelope first")
        if faults:
            raise ValueError("; ".join(faults))

    @cached_property
    def draft_widths(self) -> tuple[int, ...]:
        """All draft widths that have a cost, ascending."""
        return tuple(sorted(self.draft_ms))

    @cached_property
    def verify_widths(self) -> tuple[int, ...]:
        """All verify widths that have a cost, ascending."""
        return tuple(sorted(self.verify_ms))

    def drafting_ms(self, width: int, depth: int) -> float:
        """Return the cost of drafting ``depth`` (>= 1) levels; free guesses (``width`` 0) cost nothing."""
        if width == 0:
            return 0.0
        return self.head_ms + (depth - 1) * self.draft_ms[width]

    def iteration_ms(self, width: int, depth: int, verify_width: int) -> float:
        """Return the cost of one iteration; depth 0 is a plain target step, whatever the widths."""
        if depth == 0:
            return self.plain_ms
        if width == 0:
            return self.free_ms(verify_width)
        return self.drafting_ms(width, depth) + self.verify_ms[verify_width] + self.overhead_ms

    def free_ms(self, verify_width: int) -> float:
        """Return the cost of an iteration whose guesses cost no pass."""
        overhead_ms = self.overhead_ms if self.free_overhead_ms is None else self.free_overhead_ms
        return self.verify_ms[verify_width] + overhead_ms

    def pass_share(self, shape: TreeShape) -> float:
        """How much of an iteration is the target's pass."""
        width = shape.verify_width if shape.depth else 1
        return self.verify_ms[width] / StepCosts.iteration_ms(self, *shape)

    def read_share(self, verify_width: int) -> float:
        """How much of a pass is waiting for memory, to the power of ``OVERLAP``: all of it where one row is read."""
        return self._read_shares[verify_width]

    @cached_property
    def _read_shares(self) -> dict[int, float]:
        """By verify width: what a pass takes beyond a row's is computing, the rest waiting.

        Of one that takes hardly longer, costs do not tell how long it computes: no longer, then, than its rows' share
        of a wider pass.
        """
        row, shares = self.verify_ms[1], dict[int, float]()
        least = float("inf")  # that computing a row takes in a pass as wide or wider, to the power of OVERLAP
        for width in reversed(self.verify_widths):
            computing = self.verify_ms[width] ** OVERLAP - row**OVERLAP
            if self.verify_ms[width] < _TELLING * row:
                computing = min(computing, least * width**OVERLAP)
            least = min(least, computing / width**OVERLAP)
            shares[width] = float(1.0 - computing / self.verify_ms[width] ** OVERLAP)
        return shares

    def where_memory_is(self, slowness: float) -> StepCosts:
        """What passes cost where memory is ``slowness`` times as slow beside the cores as it was.

        A pass of few rows waits for memory, one of many for the cores. The narrowest tree's pass keeps its time and
        only the ratios to it change: how slow the machine is in all is for others to follow.
        """
        shares = {width: self.read_share(width) for width in self.verify_widths}
        slowed = {
            width: self.verify_ms[width] * (share * slowness**OVERLAP + 1.0 - share) ** (1.0 / OVERLAP)
            for width, share in shares.items()
        }
        narrowest = self.verify_widths[min(1, len(shares) - 1)]
        level = self.verify_ms[narrowest] / slowed[narrowest]
        rising = accumulate(slowed.values(), max)  # where they cost the same, rounding could order them otherwise
        return replace(self, verify_ms={width: level * ms for width, ms in zip(slowed, rising, strict=True)})

    def speedup(self, aal: float, width: int, depth: int, verify_width: int) -> float:
        """Return equation 3 of the paper with the overhead added; ``aal`` counts the bonus token."""
        return aal * self.verify_ms[1] / self.iteration_ms(width, depth, verify_width)


def _positive_faults(name: str, table: Mapping[int, float]) -> list[str]:
    faults = [] if table else [f"{name} is empty"]
    return faults + [
        f"{name}[{width}] must be a positive time for a width >= 1, got {cost}"
        for width, cost in table.items()
        if width < 1 or not 0.0 < cost < float("inf")
    ]
