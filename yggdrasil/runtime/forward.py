"""What one pass of a model gives, whoever runs it: logits and best tokens are made when they are asked for.

Dims: W rows of the pass, R rows whose logits are wanted, V vocabulary, H hidden size.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

HEAD_INPUT = -1  # layer number of the state that the language-model head reads
RUNNERS_UP = -2  # layer number of the likeliest tokens after each row, best first: [R, K] int64
NUM_RUNNERS_UP = 8  # K
_BLOCK = 64  # logits of which the greatest is looked at first


class Head(Protocol):
    """The language-model head."""

    def logits(self, rows: Tensor) -> Tensor:
        """Of ``rows`` [R, H], [R, V]."""

    def best(self, rows: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """The greatest logit of each row, not-a-number where there is one, and its token, the lowest of a tie.

        ``logits`` are those of the rows, where they are there already.
        """


class Forward:
    """What one pass gives; unpacks as (logits, hidden, layers)."""

    def __init__(self, hidden: Tensor, layers: list[Tensor], head: Head) -> None:
        self.hidden = hidden  # [R, H], the input of the language-model head
        self.layers = layers  # outputs of the layers asked for, each [W, H]
        self._head = head

    @cached_property
    def logits(self) -> Tensor:
        """[R, V]."""
        return self._head.logits(self.hidden)

    def best_tokens(self) -> tuple[Tensor, Tensor]:
        """The greatest logit of each row and its token, [R] each."""
        return self._head.best(self.hidden, self.__dict__.get("logits"))

    def __iter__(self) -> "Iterator[Tensor | list[Tensor]]":
        return iter((self.logits, self.hidden, self.layers))


class ModelCall(Protocol):
    """The part of every step that runs the model, over weights and caches given as inputs."""

    vocab_size: int
    hidden_layers: tuple[int, ...]  # whose outputs a pass gives

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
        """``tokens`` and ``positions`` [W] int64; ``tree_mask`` [W, T] bool over the slots from ``offsets[0]`` on.

        ``offsets`` [2] int64: context length, first slot written. ``rows`` [R] int64 are those whose logits are wanted,
        all where None.
        """


def likeliest_tokens(logits: Tensor) -> Tensor:
    """The tokens of the ``NUM_RUNNERS_UP`` greatest logits of each row, best first, [R, K].

    They lie in the blocks whose greatest are among the K greatest: most of a vocabulary is only compared once.
    """
    size, most = logits.shape[-1], min(NUM_RUNNERS_UP, logits.shape[-1])
    whole = size // _BLOCK * _BLOCK
    if whole <= most * _BLOCK:
        return logits.topk(most).indices
    blocks = logits[:, :whole].unflatten(1, (-1, _BLOCK))
    best = blocks.amax(-1).topk(most).indices  # [R, K]
    places = torch.arange(_BLOCK, device=logits.device)
    tokens = (best[:, :, None] * _BLOCK + places).flatten(1)  # [R, K * _BLOCK]
    rest = torch.arange(whole, size, device=logits.device).expand(logits.shape[0], -1)
    tokens = torch.cat([tokens, rest], dim=1)
    return tokens.gather(1, logits.gather(1, tokens).topk(most).indices)
