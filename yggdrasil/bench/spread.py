"""Median and quartiles of samples. Imports no torch."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_QUARTERS = 4  # minimum number of samples for quartiles; fewer are listed


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return a dictionary with the ``median`` of ``values`` and their quartiles ``low`` and ``high``.

    With fewer than four values, ``low`` and ``high`` are the extremes, and ``samples`` lists the sorted values. Without
    values, all three are 0 and ``samples`` is empty.
    """
    if len(values) >= _QUARTERS:
        low, median, high = statistics.quantiles(values, n=_QUARTERS, method="inclusive")
        return {"median": median, "low": low, "high": high}
    ordered = sorted(values) or [0.0]
    found = {"median": statistics.median(ordered), "low": ordered[0], "high": ordered[-1]}
    return {**found, "samples": sorted(values)}


def describe(found: Mapping[str, Any], digits: int = 2) -> str:
    """Format median and quartiles as text: "1.29 (1.10 to 1.48)".

    Two or three samples are listed, as in "1.29 (1.10, 1.48)". For at most one sample the text is the median alone.

    Args:
        found: a result of ``spread``.
        digits: decimals.
    """

    def number(value: float) -> str:
        return f"{value:.{digits}f}"

    samples, median = found.get("samples"), number(found["median"])
    if samples is None:
        return f"{median} ({number(found['low'])} to {number(found['high'])})"
    return median if len(samples) < 2 else f"{median} ({', '.join(map(number, samples))})"
