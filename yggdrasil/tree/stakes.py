"""When a tree that costs no pass need not grow on: no wider pass could be worth most with what may still be guessed."""

from array import array
from collections.abc import Sequence
from math import exp, inf
from typing import TypeAlias

# How many tokens come of one that is promised, then each verify width above 1 and what a token of its pass is worth,
# widths ascending and worths not rising. None at all: every tree is grown in full.
Stakes: TypeAlias = "array[float]"
NO_STAKES: Stakes = array("d")
_ROUNDING = 1.0 + 1e-6  # scores are kept as float32


class Race:
    """Between the widths that are grown already and the wider ones, while nodes come in falling order of score.

    A width's worth is what its nodes promise, as far as promises are kept, by what a token is worth there. A limit on
    the tokens that may come changes nothing: it takes more from the wider. ``models/kernels/race.h`` is the same.
    """

    def __init__(self, stakes: Stakes) -> None:
        self._kept = stakes[0] if stakes else 0.0
        self._wider: Sequence[tuple[float, float]] = list(zip(stakes[1::2], stakes[2::2], strict=True))
        self._best = -inf
        self._size, self._promised = 0, 0.0

    def add(self, score: float) -> None:
        """The tree has another node."""
        self._size, self._promised = self._size + 1, self._promised + exp(score)
        if self._wider and self._size == self._wider[0][0]:
            self._best = max(self._best, self._worth(self._promised, self._wider[0][1]))
            self._wider = self._wider[1:]

    def is_over(self, score: float) -> bool:
        """Whether no wider pass can win, if no further node has more than ``score``."""
        likely = exp(score)
        return self._best > -inf and all(
            self._worth(self._promised + (width - self._size) * likely, weight) * _ROUNDING <= self._best
            for width, weight in self._wider
        )

    def _worth(self, promised: float, weight: float) -> float:
        return (1.0 + (promised - 1.0) * self._kept) * weight
