"""Finds and lowers measured times of passes that a pause of the machine made too long."""

from collections.abc import Mapping

_OVER_PARTS = 1.5  # limit of a pass's time, as a factor over narrower passes that together cover the same rows


def without_pauses(measured: Mapping[int, float]) -> dict[int, float]:
    """Return the measured times, lowered where only a pause of the machine explains them.

    A pass over W rows takes at most 1.5 times as long as narrower passes that cover W rows together. Longer times are
    lowered to this limit. The result is ordered by ascending width.

    Args:
        measured: width (rows of a pass) -> milliseconds.
    """
    found: dict[int, float] = {}
    for width in sorted(measured):
        parts = (-(-width // narrower) * ms for narrower, ms in found.items())
        found[width] = min(measured[width], _OVER_PARTS * min(parts, default=measured[width]))
    return found


def has_pause(measured: Mapping[int, float]) -> bool:
    """Return whether ``without_pauses`` would lower a time in ``measured`` (width -> milliseconds) by more than 1 %."""
    return any(measured[width] > 1.01 * ms for width, ms in without_pauses(measured).items())
