"""Sums over decoding iterations: tokens, milliseconds and counts of tree shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from yggdrasil.tree.shape import TreeShape


@dataclass(frozen=True)
class Totals:
    """Sums over all iterations of one or several documents."""

    tokens: int  # generated tokens
    iterations: int
    milliseconds: float
    shapes: Counter[TreeShape]  # number of iterations by tree shape
    document_ms: tuple[float, ...] = ()  # milliseconds of each document, in order

    @property
    def aal(self) -> float:
        """Average accepted length: tokens per iteration, bonus token included."""
        return self.tokens / self.iterations

    @property
    def ms_per_token(self) -> float:
        """Mean milliseconds per generated token."""
        return self.milliseconds / self.tokens


class ShapeTally:
    """Counts iterations by tree shape and sums their milliseconds by document, for ``Totals``."""

    def __init__(self) -> None:
        self._shapes: Counter[TreeShape] = Counter()
        self._document_ms: list[float] = []

    def begin(self) -> None:
        """Begin a document, to which the milliseconds of later ``add`` calls count.

        It must be called before the first ``add``. Shapes are counted over all documents.
        """
        self._document_ms.append(0.0)

    def add(self, shape: TreeShape, milliseconds: float) -> None:
        """Count an iteration of ``shape`` that took ``milliseconds``, in the document of the last ``begin``."""
        self._shapes[shape] += 1
        self._document_ms[-1] += milliseconds

    def result(self, tokens: int) -> Totals:
        """Return the sums over all counted iterations. ``tokens`` is the number of tokens that they generated."""
        each = tuple(self._document_ms)
        return Totals(tokens, self._shapes.total(), sum(each), self._shapes, each)
