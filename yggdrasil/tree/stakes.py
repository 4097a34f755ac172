"""When a tree that costs no pass need not grow on: no wider pass could be worth most with what may still be guessed."""

from array import array
from collections.abc import Iterable, Sequence
from math import exp, inf
from typing import TypeAlias

# How many tokens come of one that is promised, then each verify width above 1 and what a token of its pass is worth,
# widths ascending. None at all: every tree is grown in full.
Stakes: TypeAlias = "array[float]"
NO_STAKES: Stakes = array("d")
_ROUNDING = 1.0 + 1e-6  # scores are kept as float32


def stakes_of(passes: Iterable[tuple[int, float]]) -> Stakes:
    """Of ``passes``: verify widths above 1, ascending, and what a token is worth there."""
    return array("d", [1.0, *(number for each in passes for number in each)])


class Race:
    """Between the widths that are grown already and the wider ones, while nodes come in falling order of score.

    A width's worth is what its nodes promise, as far as promises are kept, by what a token is worth there. A limit on
    the tokens that may come changes nothing where worths do not rise: it takes more from the wider.
    ``native/race.h`` is the same.

    ``standing``: log-probabilities of nodes that are there already; each comes before the first that has less.
    """

    def __init__(self, stakes: Stakes, standing: Iterable[float] = ()) -> None:
        self._kept = stakes[0] if stakes else 0.0
        self._wider: Sequence[tuple[float, float]] = list(zip(stakes[1::2], stakes[2::2], strict=True))
        self._best = -inf
        self._size, self._promised = 0, 0.0
        self._standing = sorted(standing)  # not counted yet, the best last

    def add(self, score: float) -> None:
        """The tree has another node."""
        self._pass_standing(score)
        self._count(score)

    def _pass_standing(self, score: float) -> None:
        while self._standing and self._standing[-1] >= score:
            self._count(self._standing.pop())

    def _count(self, score: float) -> None:
        self._size, self._promised = self._size + 1, self._promised + exp(score)
        if self._wider and self._size == self._wider[0][0]:
            self._best = max(self._best, self._worth(self._promised, self._wider[0][1]))
            self._wider = self._wider[1:]

    def is_over(self, score: float) -> bool:
        """Whether no wider pass can win, if no further node has more than ``score``."""
        self._pass_standing(score)
        likely = exp(score)
        return self._best > -inf and all(
            self._worth(self._promised + (width - self._size) * likely, weight) * _ROUNDING <= self._best
            for width, weight in self._wider
        )

    def _worth(self, promised: float, weight: float) -> float:
        return (1.0 + (promised - 1.0) * self._kept) * weight
