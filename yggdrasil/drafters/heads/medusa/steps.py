"""Steps of Medusa heads: one pass computes the candidates of all depths, and levels grow without further passes.

The candidates at a depth do not depend on the path, so they are stored in a table with one row per depth. The
candidates of a node are the row of its depth.

Dims: W rows, N tree nodes, D heads, K candidates per node, H hidden size, M calibration knots.
"""

import torch
from torch import Tensor

from yggdrasil.drafters.heads.call import HeadCall
from yggdrasil.runtime.passes import CallStep, StepModule
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree, attach_best, likeliest, offer, plant_root


class MedusaCall(HeadCall):
    """The traced part of the step: the heads as a function of their weights."""

    def __call__(self, weights: list[Tensor], state: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the top ``count`` log-probabilities and target token ids of each depth, [D, count] each.

        Args:
            weights: the heads' tensors.
            state: [1, H] hidden state before the last accepted token.
        """
        logits: Tensor = self.run(lambda module, state: module.head(state), weights, state)
        edges, drafted = likeliest(logits[0], count)
        return edges, self.target_tokens(weights, drafted)


class MedusaStep(CallStep[MedusaCall]):
    """Draft all depths from the hidden state before the last accepted token, which becomes the root with candidates."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        token: Tensor,  # [1] int64
        state: Tensor,  # [1, H]
        edges: Tensor,  # [D, K] float32, written
        candidates: Tensor,  # [D, K] int64, written
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        found = self._call(weights, state, tree.candidates)
        edges.copy_(found[0])
        candidates.copy_(found[1])
        plant_root(tree, token)
        root = torch.zeros_like(token)
        offer(tree, root, found[0][:1], found[1][:1], knots)
        return (root,)


class MedusaLevelStep(StepModule):
    """Attach the W best candidates, and add the table's candidates of each new node's depth to the pool."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: unused, index of the first new node
        rows: Tensor,  # [W] int64; only its size is read
        edges: Tensor,  # [D, K] float32
        candidates: Tensor,  # [D, K] int64
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        nodes = attach_best(tree, place[1:], rows.shape[0])
        row = tree.depths[nodes].clamp(max=edges.shape[0] - 1)
        offer_to_depth(tree, nodes, edges[row], candidates[row], knots, edges.shape[0])
        return (nodes,)


def offer_to_depth(tree: TokenTree, nodes: Tensor, edges: Tensor, tokens: Tensor, knots: Tensor, depth: int) -> None:
    """Write the K candidates below each of ``nodes`` to the tree's pool; nodes at ``depth`` or deeper get none.

    Candidates that a node does not get are written with the score -inf.

    Args:
        nodes: [W] int64 node indices.
        edges: [W, K] float32 log-probabilities of the candidates.
        tokens: [W, K] int64 token ids of the candidates.
        knots: [M] float32 acceptance calibration.
    """
    offer(tree, nodes, edges, tokens, knots)
    entries = (nodes[:, None] * tree.candidates + torch.arange(tree.candidates, device=nodes.device)).flatten()
    is_above = (tree.depths[nodes] < depth).repeat_interleave(tree.candidates)
    tree.pool_scores[entries] = torch.where(is_above, tree.pool_scores[entries], NO_SCORE)
