"""Training-time test (EAGLE-3): runs a head on its own outputs in training, as drafting does.

Row t of step s reads token t + 1 + s and the output of row t in step s - 1 (the target's states in step 0), and
predicts token t + 2 + s. The row attends to rows 0 to t of step 0 and to row t of steps 1 to s, as in drafting.

Dims: B windows, T rows, S concatenated target states, H hidden size, A trained tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from yggdrasil.drafters.heads.eagle.eagle3 import EagleHead


class Batch(NamedTuple):
    """A batch of training windows with the target's states, padded on the right."""

    tokens: Tensor  # [B, T] int64
    states: Tensor  # [B, T, S], concatenated outputs of the layers that a head reads
    last: Tensor  # [B, T, H], the input of the target's LM head
    learned: Tensor  # [B, T] bool: positions whose next token is trained on

    def to(self, device: torch.device) -> Self:
        """Return the batch of training windows on ``device``."""
        return type(self)(*(tensor.to(device) for tensor in self))

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """(Window indices, positions) of the tokens before the trained tokens, [A] int64 each."""
        windows, positions = self.learned.nonzero(as_tuple=True)
        return windows, positions


class StepOutput(NamedTuple):
    """The logits of one draft step, at the trained positions that the step reaches."""

    logits: Tensor  # [reached.sum(), draft vocabulary]
    reached: Tensor  # [A] bool: whether the step reaches a trained position


class _Unrolled:
    """Attention of each row t over rows 0 to t of step 0 and over row t of the later steps."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store one draft step's keys and values, and return the attention output [B, T, heads, head size].

        Args:
            query, key, value: [B, heads, T, head size]; keys and values may have fewer heads.
        """
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


def unroll(head: EagleHead, embedding: Tensor, batch: Batch, steps: int) -> Iterator[StepOutput]:
    """Run a head on its own outputs for several draft steps, and yield each step's logits at the trained positions.

    Args:
        embedding: [V, H] token embedding of the target.
        batch: windows of training text.
        steps: number of draft steps.
    """
    windows, positions = batch.places
    attention = _Unrolled()
    features = head.feature(batch.states[:, :-1])
    rows = torch.arange(features.shape[1], device=features.device)
    for step in range(steps):
        # The padding is in rows that no trained position reads.
        read = functional.pad(batch.tokens[:, 1 + step :], (0, step))
        outputs = head(functional.embedding(read, embedding), features, rows + step, attention.attend)
        reached = positions - 1 - step >= 0
        yield StepOutput(head.logits(outputs[windows[reached], positions[reached] - 1 - step]), reached)
        features = head.fed_back(outputs)
