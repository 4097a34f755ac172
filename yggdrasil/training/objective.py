"""What is learned, and how well: the target's distribution over the draft vocabulary, and its choices.

Dims: A learned tokens, Vd draft vocabulary.
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.training.target_head import TargetHead, target_head
from yggdrasil.training.unroll import Batch, StepOutput

_STEP_WEIGHT = 0.8  # of a step in that of the one before
_TOGETHER = 32  # laws that a processor's own cache holds


class Teacher:
    """The target's own head, as far as it says which drafted token comes next."""

    def __init__(self, head: TargetHead, vocabulary: Tensor, vocab_size: int) -> None:
        self._head = head  # of the drafted tokens
        drafted = torch.full((vocab_size,), -1, dtype=torch.int64)
        drafted[vocabulary] = torch.arange(len(vocabulary))
        self._drafted = drafted.to(head.rows.device)

    @classmethod
    def of(cls, loaded: LoadedModel, vocabulary: Tensor) -> Self:
        """Of the drafted tokens ``vocabulary`` [Vd]."""
        return cls(target_head(loaded).of(vocabulary), vocabulary, loaded.vocab_size)

    def laws(self, batch: Batch) -> Tensor:
        """The target's probabilities at the learned places, of the draft vocabulary alone [A, Vd]."""
        windows, positions = batch.places
        return self._head.logits(batch.last[windows, positions]).softmax(-1)

    def choices(self, batch: Batch) -> Tensor:
        """The drafted number of each learned token [A]; -1 where it cannot be drafted."""
        windows, positions = batch.places
        return self._drafted[batch.tokens[windows, positions + 1]]


class _CrossEntropy(torch.autograd.Function):
    """The sum over rows of weights [A] x cross entropies of ``logits`` [A, Vd] to ``laws`` [A, Vd].

    The gradient is made at once, a few rows at a time: nothing else as large as the laws goes through memory.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, laws: Tensor, weights: Tensor) -> Tensor:
        gradient, total = torch.empty_like(logits), weights.new_zeros(())
        for begin in range(0, len(logits), _TOGETHER):
            rows = slice(begin, begin + _TOGETHER)
            drafted, law, weight = logits[rows].float().log_softmax(-1), laws[rows], weights[rows]
            total -= (drafted * law).sum(-1) @ weight
            gradient[rows] = drafted.exp_().sub_(law).mul_(weight[:, None])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None


def loss_of(steps: Iterable[StepOutput], teacher: Teacher, batch: Batch) -> Tensor:
    """Cross entropy to the target's distribution over all draft ``steps``, of tokens that can be drafted; 0 of none."""
    with torch.no_grad():
        laws, drafted = teacher.laws(batch), teacher.choices(batch) >= 0
    total, weights = torch.zeros(()), 0.0
    for step, (logits, reached) in enumerate(steps):
        counted = drafted[reached].float()
        weight = _STEP_WEIGHT**step if counted.any() else 0.0
        wanted = laws if reached.all() else laws[reached]
        shares = counted * (weight / counted.sum().clamp(min=1.0))
        total = total + _CrossEntropy.apply(logits, wanted, shares)  # type: ignore[no-untyped-call]
        weights += weight
    return total / max(weights, 1.0)


@torch.no_grad()
def hits_of(steps: Iterable[StepOutput], teacher: Teacher, batch: Batch, best: int = 4) -> Tensor:
    """Of each draft step: tokens guessed first, guessed among the ``best``, and all there are [steps, 3]."""
    choices = teacher.choices(batch)
    rows = []
    for logits, reached in steps:
        wanted = choices[reached]
        found = logits.topk(best, dim=-1).indices == wanted[:, None]
        rows.append([float(found[:, 0].sum()), float(found.any(-1).sum()), float(len(wanted))])
    return torch.tensor(rows)
