"""Greedy acceptance: the longest path whose every token is what the target would have chosen.

Dims: W verified nodes, D longest path below the root.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def accept_greedy(
    tokens: Tensor,  # [W] int64, row 0 is the root
    parents: Tensor,  # [W] int64, rows
    ancestors: Tensor,  # [W, W] bool, rows
    exists: Tensor,  # [W] bool, false for padding
    choices: Tensor,  # [W] int64, the target's choice after each row
) -> tuple[Tensor, Tensor]:
    """Walk the tree along the target's choices; returns (last accepted row [1], accepted rows as a mask [W]).

    The root is always accepted. A row is accepted when it and every ancestor carry the choice made at their parent;
    siblings carry different tokens, so the accepted rows are one path. The target's choice at the last accepted row
    is the bonus token. Pure tensor code, traced into the compiled verification step.
    """
    width = tokens.shape[0]
    is_root = torch.arange(width, device=tokens.device) == 0
    follows = is_root | (exists & (tokens == choices[parents]))
    accepted = ~(ancestors & ~follows).any(dim=1)
    depths = ancestors.sum(dim=1)
    last = torch.where(accepted & (exists | is_root), depths, 0).argmax(dim=0, keepdim=True)
    return last, ancestors[last].squeeze(0) & accepted  # an index of no dimension would be read by the host


def walk_greedy(
    nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int], exists: Sequence[bool], choices: Sequence[int]
) -> list[int]:
    """Accepted rows from the root's on, found on the host; the slow readable twin of ``accept_greedy``.

    Row i holds node ``nodes[i]`` below node ``parents[i]``, row 0 the root; padding does not exist.
    """
    child = {(parents[row], tokens[row]): row for row in range(1, len(nodes)) if exists[row]}
    rows = [0]
    while (following := child.get((nodes[rows[-1]], choices[rows[-1]]))) is not None:
        rows.append(following)
    return rows
