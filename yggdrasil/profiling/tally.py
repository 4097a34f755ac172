"""Sums over iterations: tokens, milliseconds and counts of tree shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from yggdrasil.tree.shape import TreeShape


@dataclass(frozen=True)
class Totals:
    """Sums over all iterations of some documents.

    ``shapes`` counts iterations by shape. ``document_ms`` has the milliseconds of each document, in order.
    """

    tokens: int
    iterations: int
    milliseconds: float
    shapes: Counter[TreeShape]
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
    """Counter of iterations by tree shape, which adds up ``Totals``."""

    def __init__(self) -> None:
        self._shapes: Counter[TreeShape] = Counter()
        self._document_ms: list[float] = []

    def begin(self) -> None:
        """Begin a document: the milliseconds added from now on are summed for it. Call it before the first ``add``.

        Shapes are counted over all documents.
        """
        self._document_ms.append(0.0)

    def add(self, shape: TreeShape, milliseconds: float) -> None:
        """Count an iteration of ``shape`` that took ``milliseconds``, in the document that ``begin`` has begun."""
        self._shapes[shape] += 1
        self._document_ms[-1] += milliseconds

    def result(self, tokens: int) -> Totals:
        """Return the sums over all iterations counted, which together gave ``tokens`` tokens."""
        each = tuple(self._document_ms)
        return Totals(tokens, self._shapes.total(), sum(each), self._shapes, each)
