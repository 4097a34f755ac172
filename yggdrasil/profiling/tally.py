"""Sums over iterations: tokens, milliseconds and histograms of tree shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from yggdrasil.tree.shape import TreeShape

Histogram: TypeAlias = dict[int, int]


@dataclass(frozen=True)
class Totals:
    """Sums over all iterations of some documents.

    ``histograms`` counts iterations by "width", "depth", "verify_width" and "accepted". ``document_ms`` has the
    milliseconds of each document, in order.
    """

    tokens: int
    iterations: int
    milliseconds: float
    histograms: dict[str, Histogram]
    document_ms: tuple[float, ...] = ()

    @property
    def aal(self) -> float:
        """Average accepted length: tokens per iteration, bonus token included."""
        return self.tokens / self.iterations

    @property
    def ms_per_token(self) -> float:
        """Mean milliseconds per generated token."""
        return self.milliseconds / self.tokens


class ShapeTally:
    """Accumulates iterations into ``Totals``."""

    def __init__(self) -> None:
        self._shapes: Counter[TreeShape] = Counter()
        self._accepted: Counter[int] = Counter()
        self._document_ms: list[float] = []

    def begin(self) -> None:
        """Begin a document: ``add`` counts the following iterations as its own."""
        self._document_ms.append(0.0)

    def add(self, shape: TreeShape, accepted: int, milliseconds: float) -> None:
        """Count an iteration of ``shape`` with ``accepted`` drafted tokens that took ``milliseconds``."""
        self._shapes[shape] += 1
        self._accepted[accepted] += 1
        self._document_ms[-1] += milliseconds

    def result(self, tokens: int) -> Totals:
        """Return the totals of all iterations, which generated ``tokens`` tokens."""
        histograms = _shape_histograms(self._shapes) | {"accepted": dict(sorted(self._accepted.items()))}
        each = tuple(self._document_ms)
        return Totals(tokens, self._shapes.total(), sum(each), histograms, each)


def _shape_histograms(shapes: Counter[TreeShape]) -> dict[str, Histogram]:
    histograms: dict[str, Histogram] = {}
    for field_name in TreeShape._fields:
        counts: Counter[int] = Counter()
        for shape, count in shapes.items():
            counts[getattr(shape, field_name)] += count
        histograms[field_name] = dict(sorted(counts.items()))
    return histograms
