"""The pass times of another engine, measured on a running server or read from a file."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from yggdrasil.artifacts import parse_dataclass, parse_json
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import StepCosts, lower_envelope

_LONGEST = 10  # digits of a width
_MOST_MS = 1e9  # longest time of a pass (eleven days), so that extrapolated times stay finite


@dataclass(frozen=True)
class EngineCosts:
    """Milliseconds of an engine's passes, overhead included, by width: the number of tokens that a pass reads.

    ``target_ms`` needs width 1, the plain step, and a greater width; ``drafter_ms`` is empty if no model drafts. Times
    between the widths are interpolated; times beyond the greatest width are extrapolated from the two greatest.

    Raises:
        ValueError: a width or a time is missing or out of range.
    """

    target_ms: dict[int, float]
    drafter_ms: dict[int, float]

    def __post_init__(self) -> None:
        for name, table in (("target_ms", self.target_ms), ("drafter_ms", self.drafter_ms)):
            if any(width < 1 or not 0.0 < ms < _MOST_MS for width, ms in table.items()):
                raise ValueError(
                    f"{name} must have positive times (less than {_MOST_MS:g} ms) for widths from 1 on, got {table}"
                )
        if 1 not in self.target_ms or len(self.target_ms) < 2:
            raise ValueError(f"target_ms needs width 1 and a wider one, got {sorted(self.target_ms)}")
        if self.drafter_ms and 1 not in self.drafter_ms:
            raise ValueError(f"drafter_ms needs width 1, got {sorted(self.drafter_ms)}")

    @property
    def plain_ms(self) -> float:
        """Milliseconds per token without speculation."""
        return self.target_ms[1]

    def steps(
        self, widths: Iterable[int], draft_widths: Iterable[int] = (1,), *, reads_again: bool = False
    ) -> StepCosts:
        """Return the engine's pass times as step costs for the policy's objective.

        Times are interpolated or extrapolated. A width that takes longer than a greater width gets the time of the
        greater width.

        Args:
            widths: verify widths (rows of a target pass) of the result; 1 is added.
            draft_widths: draft widths (rows of a draft step) of the result.
            reads_again: whether the drafter also reads the tokens that the target verifies. The time of that drafter
                pass is added to the times of all verify widths but 1.
        """
        wanted = sorted({1, *widths})
        verify = {width: _at(self.target_ms, width) for width in wanted}
        if reads_again and self.drafter_ms:
            verify |= {width: ms + _at(self.drafter_ms, width) for width, ms in verify.items() if width > 1}
        # Without a drafter these costs are not used.
        drafter = self.drafter_ms or {1: self.plain_ms}
        draft = {width: _at(drafter, width) for width in draft_widths}
        falling = {width: ms for width, (ms, _) in lower_envelope(verify).items()}
        return StepCosts(min(draft.values()), draft, falling, 0.0, self.plain_ms)

    @classmethod
    def load(cls, path: Path) -> "EngineCosts":
        """Load pass times from a JSON file such as ``{"target_ms": {"1": 9.1, "4": 11.8}, "drafter_ms": {"1": 2.0}}``.

        The keys are numbers of tokens that a forward pass reads, the values the pass's milliseconds. ``drafter_ms`` may
        be missing.

        Raises:
            YggdrasilError: the file cannot be read or has other content.
        """
        try:
            found: Any = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise YggdrasilError(f"{path} holds no JSON ({error}); docs/export.md shows costs") from None
        if isinstance(found, dict):
            found = {key: _with_widths(value) for key, value in found.items()}
            found.setdefault("drafter_ms", {})
        return parse_dataclass(cls, found, str(path))


def _with_widths(table: object) -> object:
    """Convert decimal keys, which are text in JSON, to integers."""
    if not isinstance(table, dict):
        return table
    return {int(key) if str(key).isdecimal() and len(key) < _LONGEST else key: value for key, value in table.items()}


def _at(measured: dict[int, float], width: int) -> float:
    """Return milliseconds of a pass at ``width``, linearly interpolated or, with slope >= 0, extrapolated."""
    widths = sorted(measured)
    times = [measured[each] for each in widths]
    if width <= widths[-1] or len(widths) == 1:
        return float(np.interp(width, widths, times))
    slope = (times[-1] - times[-2]) / (widths[-1] - widths[-2])
    return times[-1] + max(slope, 0.0) * (width - widths[-1])
