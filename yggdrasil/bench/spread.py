"""The middle of some samples, and how far they lie apart. No torch: tables are made without it."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_QUARTERS = 4  # samples that quartiles are made of at least; fewer say more one by one


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles (``low``, ``high``), which never leave the samples; 0 where there are none.

    Fewer than four are listed as ``samples`` too, from least to greatest, and low and high are the outer ones.
    """
    if len(values) >= _QUARTERS:
        low, median, high = statistics.quantiles(values, n=_QUARTERS, method="inclusive")
        return {"median": median, "low": low, "high": high}
    ordered = sorted(values) or [0.0]
    found = {"median": statistics.median(ordered), "low": ordered[0], "high": ordered[-1]}
    return {**found, "samples": sorted(values)}


def describe(found: Mapping[str, Any], digits: int = 2) -> str:
    """The median and, in brackets, the quartiles or all samples: "1.29 (1.10 to 1.48)", "1.29 (1.10, 1.48)"."""

    def number(value: float) -> str:
        return f"{value:.{digits}f}"

    samples, median = found.get("samples"), number(found["median"])
    if samples is None:
        return f"{median} ({number(found['low'])} to {number(found['high'])})"
    return median if len(samples) < 2 else f"{median} ({', '.join(map(number, samples))})"
