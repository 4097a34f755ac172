"""Acceptance rules as tensor code of static shapes, for captured steps: the equivalent of ``rules.py``.

Dims: W verified rows, row 0 is the root; V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.acceptance.greedy import accept_greedy
from yggdrasil.acceptance.tensor_sampling import DeviceRule, SamplingInputs, is_thinking


class PassRows(NamedTuple):
    """The rows of a pass over a tree. Parents come before children."""

    nodes: Tensor  # [W] int64, node indices in the drafted tree
    tokens: Tensor  # [W] int64
    parents: Tensor  # [W] int64, row of each row's parent
    ancestors: Tensor  # [W, W] bool; [i, j] is true if row j is on the path to row i, also for j = i
    exist: Tensor  # [W] bool, false for padding


def accept(
    rule: DeviceRule, rows: PassRows, scores: Tensor, choices: Tensor, inputs: SamplingInputs
) -> tuple[Tensor, Tensor]:
    """Accept a path by ``rule``: return the accepted rows, [W] bool, and the token after each row, [W] int64.

    The root is always accepted. The committed tokens are the tokens after the accepted rows; the token after the
    deepest accepted row is the bonus token.

    Args:
        rows: the rows of the pass.
        scores: [W, V] float32, processed logits.
        choices: [W] int64, the target's token after each row; the rule may replace it by an accepted child's.
        inputs: parameters of the request.
    """
    if rule == "typical":
        return _accept_typical(rows, scores, choices, inputs)
    if rule == "relaxed":
        choices = _relaxed_choices(rows, scores, choices, inputs)
    return accept_greedy(rows.tokens, rows.parents, rows.ancestors, rows.exist, choices)[1], choices


def _relaxed_choices(rows: PassRows, scores: Tensor, choices: Tensor, inputs: SamplingInputs) -> Tensor:
    """Return the tokens chosen after each row, [W] int64: ``choices``, changed where the relaxed rule allows it.

    A choice that no child of the row holds is replaced by the child with the highest score, if that is among the
    ``relaxed_topk`` best and within ``thresholds[0]`` of the best, and the row is in the thinking section, if there is
    one.
    """
    numbers = torch.arange(choices.shape[0], device=choices.device)
    is_child = (rows.parents == numbers[:, None]) & rows.exist & (numbers > 0)  # [parent, child]
    has_choice = (is_child & (rows.tokens == choices[:, None])).any(1)
    offered = scores.index_select(1, rows.tokens)
    least = scores.sort(-1).values.index_select(-1, scores.shape[-1] - inputs.relaxed_topk)
    floor = scores.amax(-1, keepdim=True) - inputs.thresholds[:1]
    is_acceptable = is_child & (offered >= torch.maximum(least, floor)) & (offered > float("-inf"))
    is_acceptable &= is_thinking(rows.tokens, rows.ancestors & (numbers > 0), inputs)[:, None]
    best = torch.where(is_acceptable, offered, float("-inf")).argmax(1)
    return torch.where(is_acceptable.any(1) & ~has_choice, rows.tokens[best], choices)


def _accept_typical(rows: PassRows, scores: Tensor, choices: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
    """Return what ``accept`` returns for the longest path of typical tokens; of several longest, the most probable."""
    width = choices.shape[0]
    is_root = torch.arange(width, device=choices.device) == 0
    law = (inputs.vocabulary == scores.argmax(-1, keepdim=True)).double()
    law = torch.where(inputs.is_drawn > 0, scores.double().softmax(-1), law)
    epsilon, delta = inputs.thresholds.double().split(1)
    bound = torch.minimum(epsilon, delta * torch.xlogy(law, law).sum(-1).exp())
    probability = law[rows.parents, rows.tokens]  # of each row's token after its parent
    ends = (inputs.ends[rows.tokens] > 0) & ~is_root
    follows = is_root | (rows.exist & (probability > bound[rows.parents]) & ~ends[rows.parents])
    accepted = ~(rows.ancestors & ~follows).any(1)
    depths = rows.ancestors.sum(1)
    deepest = torch.where(accepted, depths, 0).amax(0, keepdim=True)
    logs = torch.where(rows.ancestors & ~is_root, probability.log(), 0.0).sum(1)
    last = torch.where(accepted & (depths == deepest), logs, float("-inf")).argmax(0, keepdim=True)
    path = rows.ancestors[last].squeeze(0)
    follower = path & ~is_root
    # Rows that are not followed write to a surplus entry.
    after = torch.cat([choices, choices[:1]]).scatter(0, torch.where(follower, rows.parents, width), rows.tokens)
    return path, after[:width]
