"""Cost of one iteration in milliseconds: measured by kind of step, then corrected online by latency scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any, Literal, TypeAlias

_OVER_PARTS = 1.5  # factor over several narrower passes from which a pass's time is taken for a pause of the machine


def without_pauses(measured: Mapping[int, float]) -> dict[int, float]:
    """Return measured times with outliers lowered that only a pause of the machine explains.

    A pass over W rows takes at most 1.5 times as long as narrower passes that cover W rows together. Longer times are
    lowered to this limit.

    Args:
        measured: width (rows of a pass) -> milliseconds.
    """
    found: dict[int, float] = {}
    for width in sorted(measured):
        parts = (-(-width // narrower) * ms for narrower, ms in found.items())
        found[width] = min(measured[width], _OVER_PARTS * min(parts, default=measured[width]))
    return found


def has_pause(measured: Mapping[int, float]) -> bool:
    """Return whether a time in ``measured`` (width -> milliseconds) is more than 1 % too long to be explained.

    The limit is 1.5 times the time of narrower passes that cover as many rows.
    """
    return any(measured[width] > 1.01 * ms for width, ms in without_pauses(measured).items())


Kind: TypeAlias = Literal["plain", "model_free", "drafted"]


def lower_envelope(measured: Mapping[int, float]) -> dict[int, tuple[float, int]]:
    """Map each width to the cheapest way to run it: (milliseconds, compiled width that serves it by padding).

    Args:
        measured: compiled width -> milliseconds of a step. A step may be slower than a wider one, which then serves its
            width too. Ties go to the narrower step.

    Raises:
        ValueError: ``measured`` is empty or a time is not positive.
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
    """Measured costs of one decode iteration, in milliseconds.

    ``head_ms`` is the first draft step, which also processes the bonus token; each of the other ``depth - 1`` costs
    ``draft_ms`` (empty without a draft model or head). ``verify_ms`` must not fall as the width grows
    (``lower_envelope``). ``plain_ms`` is a whole iteration of plain decoding, including its overhead.
    ``model_free_overhead_ms`` is the overhead of an iteration with model-free drafts only, if a draft model exists too.
    ``reading_ms`` is the drafter's prefill time per token that it has not drafted: the prompt's, and those accepted
    from model-free drafts.

    Raises:
        ValueError: a cost is missing, negative or infinite; the message lists every fault.
    """

    head_ms: float
    draft_ms: dict[int, float]  # draft width -> one draft step
    verify_ms: dict[int, float]  # verify width -> one target step
    overhead_ms: float
    plain_ms: float
    model_free_overhead_ms: float | None = None
    reading_ms: float = 0.0

    def __post_init__(self) -> None:
        faults = _positive_faults("draft_ms", self.draft_ms) if self.draft_ms else []
        faults += _positive_faults("verify_ms", self.verify_ms)
        faults += [
            f"{name} must not be negative, got {value}"
            for name in ("head_ms", "overhead_ms", "model_free_overhead_ms", "reading_ms")
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
        """Draft widths (nodes a level) that have a cost, ascending."""
        return tuple(sorted(self.draft_ms))

    @cached_property
    def verify_widths(self) -> tuple[int, ...]:
        """Verify widths (rows of the target's pass) that have a cost, ascending."""
        return tuple(sorted(self.verify_ms))

    def drafting_ms(self, width: int, depth: int) -> float:
        """Return the milliseconds of drafting ``depth`` (>= 1) levels of ``width`` nodes; 0 for ``width`` 0."""
        if width == 0:
            return 0.0
        return self.head_ms + (depth - 1) * self.draft_ms[width]

    def iteration_ms(self, width: int, depth: int, verify_width: int) -> float:
        """Return the milliseconds of one iteration: drafting, verification and overhead.

        Args:
            width: draft width; 0 verifies model-free drafts only.
            depth: drafted levels; 0 is an iteration of plain decoding, whatever the widths.
            verify_width: rows of the target's pass.
        """
        if depth == 0:
            return self.plain_ms
        if width == 0:
            return self.verify_ms[verify_width] + self.model_free_iteration_overhead_ms
        return self.drafting_ms(width, depth) + self.verify_ms[verify_width] + self.overhead_ms

    @property
    def model_free_iteration_overhead_ms(self) -> float:
        """Milliseconds of an iteration with model-free drafts only, without the target's pass."""
        return self.overhead_ms if self.model_free_overhead_ms is None else self.model_free_overhead_ms


class LatencyScales:
    """Factors of the present latency over the measured costs, one for each step: plain, each verify width, drafted.

    Step 0 is plain, step i verifies model-free drafts at the i-th verify width, and the last step is any drafted tree.
    An iteration moves all factors, and its own twice as much. So the ratio of a wide pass to a plain step is followed
    too: where the memory becomes faster, plain steps gain more than wide passes, which wait for arithmetic.
    """

    COMMON_RATE, OWN_RATE = 0.1, 0.1  # share of a deviation (in logs) by which all factors move, and its own besides
    PAUSE = 1.5  # ratios to the prediction are clipped to 1/PAUSE .. PAUSE: the rest is a pause of the machine
    FARTHEST = 10.0  # the first step sets all factors within 1/FARTHEST .. FARTHEST
    DISCOUNT, AGE = 0.2, 50  # a plain step that was not timed for AGE iterations is assumed to be 20 % cheaper

    def __init__(self, num_widths: int) -> None:
        self.factors = [1.0] * (num_widths + 1)
        self._is_known = False
        self._plain_age = self.AGE  # iterations since the last warm plain step

    @property
    def plain_discount(self) -> float:
        """Factor from 0.8 to 1 on a plain step's milliseconds, so that plain steps are tried and timed now and then.

        It falls from 1 with the iterations since the last timed plain step. A tree that gains more than the discount is
        still preferred.
        """
        return 1.0 - self.DISCOUNT * min(self._plain_age, self.AGE) / self.AGE

    def observe(self, step: int, predicted_ms: float, milliseconds: float, *, is_cold: bool = False) -> None:
        """Update the latency scales by the time of one iteration.

        The first iteration that is not cold sets all factors at once, because the machine may be busy or another.

        Args:
            step: index of the factor: 0 is plain, i the i-th verify width with model-free drafts, -1 any drafted tree.
            predicted_ms: the iteration's predicted time with the present factors.
            milliseconds: its measured time.
            is_cold: the iteration follows a prefill, which fills the CPU caches, so it can only lower the factors.
        """
        ratio = milliseconds / predicted_ms
        self._plain_age = 0 if step == 0 and not is_cold else self._plain_age + 1
        if not (self._is_known or is_cold):
            self._is_known = True
            ratio = min(max(ratio, 1.0 / self.FARTHEST), self.FARTHEST)
            self.factors = [factor * ratio for factor in self.factors]
            return
        deviation = log(min(max(ratio, 1.0 / self.PAUSE), 1.0 if is_cold else self.PAUSE))
        common = 1.0 + self.COMMON_RATE * deviation
        self.factors = [factor * common for factor in self.factors]
        self.factors[step] *= 1.0 + self.OWN_RATE * deviation

    def state(self) -> dict[str, Any]:
        """Return the latency scales, one factor per kind of step, as plain data for JSON."""
        return {"factors": list(self.factors)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the factors by a result of ``state()``, of which the next step only keeps the ratios.

        Raises:
            ValueError: ``state`` has factors for another number of verify widths.
        """
        if len(state["factors"]) != len(self.factors):
            raise ValueError(f"factors of {len(state['factors'])} steps, not of {len(self.factors)}")
        self.factors = list(state["factors"])


def _positive_faults(name: str, table: Mapping[int, float]) -> list[str]:
    faults = [] if table else [f"{name} is empty"]
    return faults + [
        f"{name}[{width}] must be a positive time for a width >= 1, got {cost}"
        for width, cost in table.items()
        if width < 1 or not 0.0 < cost < float("inf")
    ]
