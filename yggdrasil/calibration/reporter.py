"""Where a calibration says how far it is."""

from collections.abc import Callable
from typing import Protocol


class Reporter(Protocol):
    """Where progress goes; phases are sequential, fractions run from 0 to 1."""

    def phase(self, title: str) -> Callable[[float], None]:
        """Begin a phase and return where its fraction is reported."""

    def close(self) -> None:
        """All phases are over, until another begins."""
