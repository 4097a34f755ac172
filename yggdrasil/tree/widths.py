"""Selects the compiled width (number of rows of a step) for a number of rows. Imports no torch."""

from collections.abc import Sequence


def fitting(widths: Sequence[int], count: int) -> int:
    """Return the smallest of ``widths`` (ascending numbers of rows) that has room for ``count`` rows.

    An AssertionError is raised if none has.
    """
    assert count <= widths[-1], f"{count} rows, and steps of {list(widths)}"
    return fitting_or_widest(widths, count)


def fitting_or_widest(widths: Sequence[int], count: int) -> int:
    """Return the smallest of ``widths`` (ascending numbers of rows) with room for ``count`` rows; else the largest."""
    return next((width for width in widths if width >= count), widths[-1])
