"""The steps of a draft model: calls with a fixed number of rows that head drafts, levels and tail drafts run.

Dims: W rows of a step, N tree nodes, M calibration knots, R possible next roots, K candidates of each.
"""

import torch
from torch import Tensor

from yggdrasil.runtime.passes import CallStep, ModelCall, StepModule
from yggdrasil.tree.token_tree import TokenTree, attach_best, likeliest, offer, offer_candidates, plant_root


class RowsStep(CallStep[ModelCall]):
    """Forward pass over W tokens at any positions of the text or the tree."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        positions: Tensor,  # [W] int64
        mask: Tensor,  # [W, T] bool over the slots from offsets[0] on
        offsets: Tensor,  # [2] int64: context length, first slot written
    ) -> tuple[Tensor]:
        """Run W tokens at any positions and return ``(logits [W, V],)``; their KV entries are written to the cache."""
        return (self._call(weights, caches, tokens, positions, mask, offsets).logits,)


def read_nodes(
    call: ModelCall,
    weights: list[Tensor],
    caches: list[Tensor],
    tree: TokenTree,
    root: Tensor,
    first: Tensor,
    nodes: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """Run the draft model on W attached tree nodes and return their logits, [W, V], or [R, V] of ``rows`` only.

    Each node attends to the tokens before the root and to its ancestors, itself included. The KV entry of node i is
    written to slot ``root`` + i.

    Args:
        call: the model as a function of ``weights`` and ``caches``, the model's tensors and KV caches.
        tree: the tree with N nodes, node 0 is the root.
        root: [1] int64 index of the root among the request's tokens.
        first: [1] int64 index of the first node that is run.
        nodes: [W] int64 consecutive node indices from ``first`` on.
        rows: [R] int64 indices into ``nodes`` whose logits are computed; None: all.
    """
    offsets = torch.cat([root, root + first])
    positions = root + tree.depths[nodes]
    return call(weights, caches, tree.tokens[nodes], positions, tree.ancestors[nodes], offsets, rows).logits


class HeadStep(CallStep[ModelCall]):
    """Run the newly committed tokens (padded to W), make the last one the tree's root, and add its top-k candidates.

    Tokens before the root may have no KV entry, or one at a tree slot. For a memory-bound model, recomputing all of
    them costs about as much as one token, and saves moving cache rows.
    """

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        span: Tensor,  # [2] int64: position of the first row, number of rows without padding
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        start, count = span[:1], span[1:]
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        last = count - 1
        mask = rows[:, None] >= rows[None, :]
        offsets = start.expand(2).contiguous()
        logits = self._call(weights, caches, tokens, start + rows, mask, offsets, last).logits
        plant_root(tree, tokens[last])
        offer_candidates(tree, torch.zeros_like(last), logits, knots)
        return (last,)


class GrowStep(CallStep[ModelCall]):
    """Attach the W best candidates, run them through the draft model, offer their top-k continuations."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: the root's position, index of the first new node
        rows: Tensor,  # [W] int64; only its size is used
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        root, first = place[:1], place[1:]
        nodes = attach_best(tree, first, rows.shape[0])
        logits = read_nodes(self._call, weights, caches, tree, root, first, nodes)
        offer_candidates(tree, nodes, logits, knots)
        return (nodes,)


class FinishStep(StepModule):
    """Attach the last level. Its nodes are leaves, so the draft model does not run them."""

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], place: Tensor, rows: Tensor, *tree_buffers: Tensor
    ) -> tuple[Tensor]:
        return (attach_best(TokenTree(*tree_buffers), place[1:], rows.shape[0]),)


class ReadStep(CallStep[ModelCall]):
    """Tail draft: run W attached nodes through the draft model, only for their keys and values."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: the root's position, index of the first node
        rows: Tensor,  # [W] int64, 0 .. W-1
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        root, first = place[:1], place[1:]
        nodes = first + rows
        last = rows[-1:].clone()
        read_nodes(self._call, weights, caches, tree, root, first, nodes, last)
        return (nodes,)


class GuessStep(CallStep[ModelCall]):
    """Head draft before acceptance: run a possible successor of each of W nodes.

    The KV entry of row r is written after the tree's, to slot root + N + r. The top-k candidates are written to
    ``edges`` and ``candidates``, not into the tree.
    """

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [1] int64: the root's position
        nodes: Tensor,  # [W] int64
        tokens: Tensor,  # [W] int64, the drafted successor of each node
        edges: Tensor,  # [W, K] float32, output: log-probabilities
        candidates: Tensor,  # [W, K] int64, output: token ids
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        rows = torch.arange(nodes.shape[0], device=nodes.device)
        mask = torch.cat([tree.ancestors[nodes], rows[:, None] == rows], dim=1)  # [W, N + W]
        offsets = torch.cat([place, place + tree.num_nodes])
        positions = place + tree.depths[nodes] + 1
        logits = self._call(weights, caches, tokens.clone(), positions, mask, offsets).logits
        found = likeliest(logits, tree.candidates)
        edges.copy_(found[0])
        candidates.copy_(found[1])
        return (nodes.clone(),)


class PlantStep(StepModule):
    """Plant the accepted successor as the next root, with the candidates that ``GuessStep`` computed for it."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        row: Tensor,  # [1] int64, the accepted successor's row of the table
        knots: Tensor,  # [M] float32
        tokens: Tensor,  # [R] int64
        edges: Tensor,  # [R, K] float32
        candidates: Tensor,  # [R, K] int64
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        plant_root(tree, tokens[row])
        offer(tree, torch.zeros_like(row), edges[row], candidates[row], knots)
        return (row.clone(),)
