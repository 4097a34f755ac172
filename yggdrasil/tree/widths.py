"""Which of the widths that steps are compiled at a number of rows takes. Imports no torch."""

from collections.abc import Sequence


def fitting(widths: Sequence[int], count: int) -> int:
    """The narrowest of the ascending ``widths`` that holds ``count`` rows, the widest where none holds them all."""
    return next((width for width in widths if width >= count), widths[-1])
