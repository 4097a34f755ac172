"""The early-stopping bound: when a model-free tree need not grow on, since no wider pass could win the objective."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import exp, inf
from typing import TypeAlias

# Per verify width above 1, ascending: the width, the objective value of its pass with nothing accepted, and what each
# expected accepted token adds. Empty: trees are grown in full. C++ reads the same float64 numbers.
StoppingBound: TypeAlias = "array[float]"
UNBOUNDED: StoppingBound = array("d")
_ROUNDING = 1.0 + 1e-6  # scores are kept as float32


def stopping_bound(widths: Sequence[int], values: Sequence[float], correction: float = 1.0) -> StoppingBound:
    """Return the bound of ``widths`` above 1, given the objective value of a token at each (``value_per_token``).

    ``correction``: accepted tokens per token that the scores expect.
    """
    return array(
        "d", [each for width, value in zip(widths, values, strict=True) for each in (width, value, value * correction)]
    )


def update_correction(bound: StoppingBound, correction: float) -> StoppingBound:
    """Change the correction of ``bound`` in place, since C++ holds its address; returns it."""
    for index in range(1, len(bound), 3):
        bound[index + 1] = bound[index] * correction
    return bound


class EarlyStopping:
    """Decides whether a tree may stop, while nodes come in falling order of score. ``native/tree`` has it in C++.

    A limit on the tokens that may be accepted changes nothing: it takes more from the wider passes.

    ``existing``: log-probabilities of nodes that are in the tree already. Each counts before the first node that has
    less.
    """

    def __init__(self, bound: StoppingBound, existing: Iterable[float] = ()) -> None:
        self._wider = list(zip(bound[::3], bound[1::3], bound[2::3], strict=True))
        self._best = -inf  # objective value of the widths that the tree has reached
        self._size, self._accepted = 0, 0.0  # nodes, the root included, and what they are expected to have accepted
        self._existing = sorted(existing)  # not counted yet, the best last

    def add(self, score: float) -> None:
        """Count a new node; the first one is the root, whose score is 0."""
        self._count_existing(score)
        self._count(score)

    def is_over(self, score: float) -> bool:
        """Return whether no wider pass can win if no further node has more than ``score``."""
        self._count_existing(score)
        likely = exp(score)
        return self._best > -inf and all(
            (base + slope * (self._accepted + (width - self._size) * likely)) * _ROUNDING <= self._best
            for width, base, slope in self._wider
        )

    def _count_existing(self, score: float) -> None:
        while self._existing and self._existing[-1] >= score:
            self._count(self._existing.pop())

    def _count(self, score: float) -> None:
        self._accepted += exp(score) if self._size else 0.0
        self._size += 1
        if self._wider and self._size == self._wider[0][0]:
            _, base, slope = self._wider.pop(0)
            self._best = max(self._best, base + slope * self._accepted)


def least_verified_score(scores: Sequence[float], bound: StoppingBound) -> float:
    """Return the least of ``scores`` that the pass with the highest objective value verifies; without bound the least.

    ``scores`` are log-probabilities of the nodes that a tree could have, the root's 0 among them.
    """
    best = sorted(scores, reverse=True)
    if not bound:
        return best[-1]
    accepted, last = [total - 1.0 for total in accumulate(map(exp, best))], len(best) - 1
    ends = [min(int(width) - 1, last) for width in bound[::3]]
    values = [base + slope * accepted[end] for end, base, slope in zip(ends, bound[1::3], bound[2::3], strict=True)]
    return best[ends[values.index(max(values))]]
