"""Measured cost of one iteration in milliseconds, by kind of step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["plain", "model_free", "drafted"]  # kinds of iterations


def lower_envelope(measured: Mapping[int, float]) -> dict[int, tuple[float, int]]:
    """Map each width, ascending, to its cheapest step: (milliseconds, compiled width that serves it by padding).

    If a step is slower than a wider step, the wider step serves both widths. Ties go to the narrower step.

    Args:
        measured: compiled width -> milliseconds of a step.

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

    ``head_ms`` is the head draft: the drafter's pass over the newly committed tokens. Each of the draft steps that
    follow, except the last, takes ``draft_ms``, which is empty without a draft model or head. The last draft step only
    attaches nodes, and its time is part of ``overhead_ms``. ``verify_ms`` must not fall as the width grows
    (``lower_envelope``). ``plain_ms`` is a whole iteration of plain decoding, including its overhead.
    ``model_free_overhead_ms`` is the overhead of an iteration with model-free drafts only; None stands for
    ``overhead_ms``. ``reading_ms`` is the drafter's prefill time per token of a prompt or accepted model-free draft.

    Raises:
        ValueError: a cost is missing, negative or infinite; the message lists every fault.
    """

    head_ms: float
    draft_ms: dict[int, float]  # draft width -> each draft step but the last
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
    def verify_widths(self) -> tuple[int, ...]:
        """Verify widths (rows of the target's pass) that have a cost, ascending."""
        return tuple(sorted(self.verify_ms))

    def drafting_ms(self, width: int, depth: int) -> float:
        """Return the milliseconds of drafting with ``depth`` (>= 1) draft steps of ``width`` nodes; 0 for ``width`` 0.

        This is the time of the head draft and of ``depth`` - 1 draft steps: the last draft step does not run the
        drafter.
        """
        return self.head_ms + (depth - 1) * self.draft_ms[width] if width else 0.0

    def iteration_ms(self, width: int, depth: int, verify_width: int) -> float:
        """Return the milliseconds of one iteration: drafting, verification and overhead.

        Args:
            width: draft width, a key of ``draft_ms``; 0 verifies model-free drafts only.
            depth: number of draft steps; 0 is an iteration of plain decoding, and then the widths are not used.
            verify_width: rows of the target's pass, a key of ``verify_ms``.
        """
        if depth == 0:
            return self.plain_ms
        overhead_ms = self.overhead_ms if width else self.model_free_iteration_overhead_ms
        return self.drafting_ms(width, depth) + self.verify_ms[verify_width] + overhead_ms

    @property
    def model_free_iteration_overhead_ms(self) -> float:
        """Milliseconds of an iteration with model-free drafts only, without the target's pass."""
        return self.overhead_ms if self.model_free_overhead_ms is None else self.model_free_overhead_ms


def _positive_faults(name: str, table: Mapping[int, float]) -> list[str]:
    faults = [] if table else [f"{name} is empty"]
    return faults + [
        f"{name}[{width}] must be a positive time for a width >= 1, got {cost}"
        for width, cost in table.items()
        if width < 1 or not 0.0 < cost < float("inf")
    ]
