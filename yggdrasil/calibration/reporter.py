"""The protocol through which long operations report progress."""

from collections.abc import Callable
from typing import Protocol


class Reporter(Protocol):
    """Receives progress. Phases are sequential; fractions run from 0 to 1."""

    def phase(self, title: str) -> Callable[[float], None]:
        """Begin a phase; returns a function that takes the fraction done."""

    def close(self) -> None:
        """End the current phase's display, until another phase begins."""
