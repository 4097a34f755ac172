"""Greedy acceptance: accept the longest path on which every token is the target's argmax after its parent.

Dims: W verified nodes, D longest path below the root.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def accept_greedy(
    tokens: Tensor, parents: Tensor, ancestors: Tensor, exists: Tensor, choices: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept the longest path on which every token is the target's argmax after its parent.

    Returns the last accepted row, [1] int64, and which rows are accepted, [W] bool. The root is always accepted.
    Siblings hold different tokens, so the accepted rows form one path. The argmax at the last accepted row is the bonus
    token. The function is pure tensor code, which is traced into the compiled verification step.

    Args:
        tokens: [W] int64 token of each row; row 0 is the root.
        parents: [W] int64 row of each row's parent.
        ancestors: [W, W] bool; [i, j] is true if row j is on the path to row i, also for j = i.
        exists: [W] bool, false for padding.
        choices: [W] int64, the target's argmax token after each row.
    """
    width = tokens.shape[0]
    is_root = torch.arange(width, device=tokens.device) == 0
    follows = is_root | (exists & (tokens == choices[parents]))
    accepted = ~(ancestors & ~follows).any(dim=1)
    depths = ancestors.sum(dim=1)
    last = torch.where(accepted & (exists | is_root), depths, 0).argmax(dim=0, keepdim=True)
    return last, ancestors[last].squeeze(0) & accepted  # a 0-dimensional index would synchronise with the host


def walk_greedy(
    nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int], exists: Sequence[bool], choices: Sequence[int]
) -> list[int]:
    """Return the accepted rows in path order, the root first: a plain Python reference of greedy acceptance.

    Args:
        nodes: node number of each row; row 0 is the root.
        tokens: token of each row.
        parents: node number of each row's parent.
        exists: False for padding rows.
        choices: the target's argmax token after each row.
    """
    child = {(parents[row], tokens[row]): row for row in range(1, len(nodes)) if exists[row]}
    rows = [0]
    while (following := child.get((nodes[rows[-1]], choices[rows[-1]]))) is not None:
        rows.append(following)
    return rows
