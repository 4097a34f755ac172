"""Training loss and accuracy of drafters: cross entropy to the target's distribution, agreement with its tokens.

Dims: A trained tokens, V vocabulary, Vd draft vocabulary, H hidden size.
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.training.target_head import TargetHead, target_head
from yggdrasil.training.unroll import Batch, StepOutput

_STEP_WEIGHT = 0.8  # loss weight of a draft step relative to the one before
_TOGETHER = 32  # rows at a time: their distributions fit a core's cache


class Teacher:
    """The target's LM head, restricted to the draft vocabulary, which gives the training targets."""

    def __init__(self, head: TargetHead, vocabulary: Tensor, vocab_size: int) -> None:
        self._head = head  # rows of the draft vocabulary only
        drafted = torch.full((vocab_size,), -1, dtype=torch.int64)
        drafted[vocabulary] = torch.arange(len(vocabulary))
        self._drafted = drafted.to(head.rows.device)

    @classmethod
    def of(cls, loaded: LoadedModel, vocabulary: Tensor) -> Self:
        """Return the LM head of ``loaded`` restricted to the draft vocabulary ``vocabulary``, [Vd] token ids.

        Raises:
            YggdrasilError: the LM head has no weight of shape [V, H].
        """
        return cls(target_head(loaded).restricted_to(vocabulary), vocabulary, loaded.vocab_size)

    def probabilities(self, batch: Batch) -> Tensor:
        """Return the target's probabilities at each trained token, [A, Vd], normalised over the draft vocabulary."""
        windows, positions = batch.places
        return self._head.logits(batch.last[windows, positions]).softmax(-1)

    def choices(self, batch: Batch) -> Tensor:
        """Return the index of each trained token in the draft vocabulary, [A] int64, or -1 outside it."""
        windows, positions = batch.places
        return self._drafted[batch.tokens[windows, positions + 1]]


class _CrossEntropy(torch.autograd.Function):
    """Sum over rows of ``weights`` [A] times the cross entropy of ``logits`` [A, Vd] to ``laws`` [A, Vd].

    The forward pass also computes the gradient, a few rows at a time, so that the gradient is the only new
    tensor of the size of ``logits``.
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
    """Return the weighted mean cross entropy to the target's distribution over all draft steps, a scalar.

    Only trained tokens of the draft vocabulary count; the loss is 0 without any. Each draft step has 0.8 times the
    weight of the step before.
    """
    with torch.no_grad():
        laws, drafted = teacher.probabilities(batch), teacher.choices(batch) >= 0
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
def count_hits(steps: Iterable[StepOutput], teacher: Teacher, batch: Batch, best: int = 4) -> Tensor:
    """Count agreement with the text per draft step, [steps, 3] float32, over the trained tokens that a step reaches.

    The columns count argmax tokens that equal the text's token, text tokens in the top ``best``, and all tokens.
    """
    choices = teacher.choices(batch)
    rows = []
    for logits, reached in steps:
        wanted = choices[reached]
        found = logits.topk(best, dim=-1).indices == wanted[:, None]
        rows.append([float(found[:, 0].sum()), float(found.any(-1).sum()), float(len(wanted))])
    return torch.tensor(rows)
