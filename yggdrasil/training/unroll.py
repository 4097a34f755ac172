"""Training-time test: a head's own outputs are its next step's features, over given tokens.

Row t of step s reads token t + 1 + s and the output of row t of the step before (of the target's states in step 0), and
says what token t + 2 + s is. It attends to the rows of step 0 up to t, and to its own row of the steps between: just
what drafting gives it.

Dims: B windows, T rows, H hidden size, A learned tokens.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from yggdrasil.drafters.heads.eagle.eagle3 import EagleHead
from yggdrasil.drafters.heads.eagle.state_head import StateHead


class Batch(NamedTuple):
    """Windows side by side, padded on the right."""

    tokens: Tensor  # [B, T] int64
    states: Tensor  # [B, T, S], side by side as a head reads them
    last: Tensor  # [B, T, H], the state that the target's head reads
    learned: Tensor  # [B, T] bool: positions whose next token is learned

    def to(self, device: torch.device) -> Self:
        """The same on ``device``."""
        return type(self)(*(tensor.to(device) for tensor in self))

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Window and position of every learned token's predecessor, [A] each."""
        windows, positions = self.learned.nonzero(as_tuple=True)
        return windows, positions


class StepOutput(NamedTuple):
    """One step at the learned places that it reaches."""

    logits: Tensor  # [A', draft vocabulary]
    reached: Tensor  # [A] bool


class _Unrolled:
    """Attention over the steps so far."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(groups, dim=1))
        self._values.append(value.repeat_interleave(groups, dim=1))
        keys, values = self._keys, self._values
        if len(keys) == 1:
            only: Tensor = functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
            return only.transpose(1, 2)
        rows, scale = query.shape[2], query.shape[-1] ** -0.5
        later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        first = (query @ keys[0].transpose(-1, -2)).masked_fill(later, float("-inf"))
        own = torch.stack([(query * each).sum(-1) for each in keys[1:]], dim=-1)
        weights = (torch.cat([first, own], dim=-1) * scale).softmax(-1)
        output: Tensor = weights[..., :rows] @ values[0]
        for number, each in enumerate(values[1:]):
            output = output + weights[..., rows + number, None] * each
        return output.transpose(1, 2)


def unroll(
    head: EagleHead | StateHead,
    embedding: Tensor,
    batch: Batch,
    steps: int,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[StepOutput]:
    """Yield logits of each of ``steps`` at the trained positions; some near a window's start are left out.

    ``logits`` maps outputs [N, H] to logits [N, V], for heads that draft states; else the head's own layer does.
    """
    logits = logits or head.logits
    windows, positions = batch.places
    attention = _Unrolled()
    features = head.feature(batch.states[:, :-1])
    rows = torch.arange(features.shape[1], device=features.device)
    for step in range(steps):
        # Tokens that would lie behind the window's end are of rows that nothing reads.
        read = functional.pad(batch.tokens[:, 1 + step :], (0, step))
        outputs = head(functional.embedding(read, embedding), features, rows + step, attention.attend)
        reached = positions - 1 - step >= 0
        yield StepOutput(logits(outputs[windows[reached], positions[reached] - 1 - step]), reached)
        features = head.fed_back(outputs)
