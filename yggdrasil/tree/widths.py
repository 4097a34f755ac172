"""Select the compiled width for a number of rows. Imports no torch."""

from collections.abc import Sequence


def fitting(widths: Sequence[int], count: int) -> int:
    """Return the smallest of the ascending ``widths`` that is at least ``count``; asserts that there is one."""
    assert count <= widths[-1], f"{count} rows, and steps of {list(widths)}"
    return fitting_or_widest(widths, count)


def fitting_or_widest(widths: Sequence[int], count: int) -> int:
    """Return the smallest of the ascending ``widths`` that is at least ``count``, or else the largest."""
    return next((width for width in widths if width >= count), widths[-1])
