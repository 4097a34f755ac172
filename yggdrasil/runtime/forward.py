"""Interface and result of one model pass. Logits and argmax tokens are computed on access.

Dims: W rows of the pass, R rows whose logits are requested, V vocabulary, H hidden size.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

from torch import Tensor

HEAD_INPUT = -1  # number of the LM head's input in ``ModelCall.hidden_layers``


class Head(Protocol):
    """Protocol of a model's LM head."""

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states ``rows`` [R, H]."""

    def best(self, rows: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (largest logit [R], its token [R] int64) for hidden states ``rows`` [R, H].

        The first token of equal logits is taken, and NaN counts as largest. ``logits`` [R, V] are those of the rows if
        they are already computed, else None.
        """


class Forward:
    """Result of one pass; unpacks as (logits, hidden, layers)."""

    def __init__(self, hidden: Tensor, layers: list[Tensor], head: Head) -> None:
        self.hidden = hidden  # [R, H], the input of the LM head
        self.layers = layers  # outputs of the requested layers, each [W, H]
        self._head = head

    @cached_property
    def logits(self) -> Tensor:
        """Return the logits [R, V] of the requested rows, computed on first access."""
        return self._head.logits(self.hidden)

    def best_tokens(self) -> tuple[Tensor, Tensor]:
        """Return (largest logit [R], its token [R] int64) of each requested row, if possible without all logits."""
        return self._head.best(self.hidden, self.__dict__.get("logits"))

    def __iter__(self) -> "Iterator[Tensor | list[Tensor]]":
        return iter((self.logits, self.hidden, self.layers))


class ModelCall(Protocol):
    """Protocol of one pass of a model, with weights and caches as arguments; every step contains one."""

    vocab_size: int
    hidden_layers: tuple[int, ...]  # indices of the layers whose outputs a pass returns

    def __call__(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,
        positions: Tensor,
        tree_mask: Tensor,
        offsets: Tensor,
        rows: Tensor | None = None,
    ) -> Forward:
        """Run the model.

        Args:
            weights: the model's tensors, in the order of ``LoadedModel.tensors``.
            caches: the cache's tensors (``StaticCache.tensors``), which are written in place.
            tokens: [W] int64.
            positions: [W] int64.
            tree_mask: [W, T] bool; which of the T slots from ``offsets[0]`` on each row sees.
            offsets: [2] int64: context length, first slot written.
            rows: [R] int64, rows whose logits are requested; None for all.
        """
