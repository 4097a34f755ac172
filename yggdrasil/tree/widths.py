"""Which of the widths that steps are compiled at a number of rows takes. Imports no torch."""

from collections.abc import Sequence


def fitting(widths: Sequence[int], count: int) -> int:
    """The narrowest of the ascending ``widths`` that holds ``count`` rows; one of them has to."""
    assert count <= widths[-1], f"{count} rows, and steps of {list(widths)}"
    return fitting_or_widest(widths, count)


def fitting_or_widest(widths: Sequence[int], count: int) -> int:
    """The same, or the widest where none holds them all: the others wait for another pass, or are left out."""
    return next((width for width in widths if width >= count), widths[-1])
