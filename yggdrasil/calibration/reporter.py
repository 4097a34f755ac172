"""The protocol through which long operations report progress."""

from collections.abc import Callable
from typing import Protocol


class Reporter(Protocol):
    """Receives progress. Phases are sequential; fractions run from 0 to 1."""

    def phase(self, title: str) -> Callable[[float], None]:
        """Begin a phase with the title ``title``, and return a function that takes the fraction done, 0 to 1."""

    def close(self) -> None:
        """End the display of the current phase, until another phase begins."""
