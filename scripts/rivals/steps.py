"""Compiled steps that attach chosen candidates to a tree and read them.

Dims: W rows, N tree nodes, M calibration knots.
"""

import torch
from torch import Tensor

from yggdrasil.drafters.level_drafter import read_nodes
from yggdrasil.runtime.passes import CallStep, ModelCall, StepModule
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree, offer_candidates


def attach_chosen(tree: TokenTree, first: Tensor, count: Tensor, entries: Tensor) -> Tensor:
    """Attach the pool ``entries`` [W] as nodes from ``first`` [1] on, and return these nodes, [W].

    Rows from ``count`` [1] on are padding, which repeats an entry. They get no score, so they do not count as nodes,
    and the next step overwrites them.
    """
    rows = torch.arange(entries.shape[0], device=entries.device)
    nodes = first + rows
    parents = entries // tree.candidates
    tree.tokens[nodes] = tree.pool_tokens[entries]
    tree.edges[nodes] = tree.pool_edges[entries]
    tree.parents[nodes] = parents
    tree.depths[nodes] = tree.depths[parents] + 1
    tree.scores[nodes] = torch.where(rows < count, tree.pool_scores[entries], NO_SCORE)
    itself = nodes[:, None] == torch.arange(tree.num_nodes, device=entries.device)
    tree.ancestors[nodes] = tree.ancestors[parents] | itself
    tree.pool_scores[entries] = NO_SCORE
    return nodes


class ChosenStep(CallStep[ModelCall]):
    """Attach W chosen candidates, run the drafter on them, and add their candidates to the pool."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [3] int64: the root's position, number of the first new node, rows that count
        entries: Tensor,  # [W] int64
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        root, first, count = place[:1], place[1:2], place[2:]
        nodes = attach_chosen(tree, first, count, entries)
        logits = read_nodes(self._call, weights, caches, tree, root, first, nodes)
        offer_candidates(tree, nodes, logits, knots)
        return (nodes,)


class ChosenLeavesStep(StepModule):
    """Attach W chosen candidates as leaves, which the drafter does not read."""

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], place: Tensor, entries: Tensor, *tree_buffers: Tensor
    ) -> tuple[Tensor]:
        return (attach_chosen(TokenTree(*tree_buffers), place[1:2], place[2:], entries),)
