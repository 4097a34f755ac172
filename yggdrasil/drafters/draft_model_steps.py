"""The compiled steps of a draft model: read what is certain, grow one level.

Dims: W rows, N tree nodes, M calibration knots.
"""

import torch
from torch import Tensor

from yggdrasil.runtime.forward import ModelCall
from yggdrasil.runtime.traced import CallStep, StepModule
from yggdrasil.tree.growth import attach_best, likeliest, offer, offer_candidates, plant_root
from yggdrasil.tree.token_tree import TokenTree


class RowsStep(CallStep[ModelCall]):
    """Read W tokens, wherever in the text or the tree they are."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        positions: Tensor,  # [W] int64
        mask: Tensor,  # [W, T] bool over the slots from offsets[0] on
        offsets: Tensor,  # [2] int64: context length, first slot written
    ) -> tuple[Tensor]:
        """Returns (logits [W, V])."""
        return (self._call(weights, caches, tokens, positions, mask, offsets).logits,)


def read_nodes(
    call: ModelCall,
    weights: list[Tensor],
    caches: list[Tensor],
    tree: TokenTree,
    place: tuple[Tensor, Tensor],
    nodes: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """Logits [R, V] after the attached ``nodes`` [W], of all or of ``rows`` [R]; their keys go to the nodes' slots.

    ``place``: the root's position [1] and the number of the first node [1]; node i lives in slot root + i.
    """
    root, first = place
    offsets = torch.cat([root, root + first])
    positions = root + tree.depths[nodes]
    return call(weights, caches, tree.tokens[nodes], positions, tree.ancestors[nodes], offsets, rows).logits


class HeadStep(CallStep[ModelCall]):
    """Read the newly certain tokens (padded to W), plant the last as root, offer its continuations.

    The rows before the root are tokens whose keys the drafter may lack or hold at a tree slot; reading them all again
    costs a memory-bound model the price of one token and spares it moving its cache.
    """

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        span: Tensor,  # [2] int64: position of the first row, rows that count
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
    """Attach the W best candidates, run them through the drafter, offer their continuations."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: the root's position, number of the first new node
        rows: Tensor,  # [W] int64; only its size is read
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        root, first = place[:1], place[1:]
        nodes = attach_best(tree, first, rows.shape[0])
        logits = read_nodes(self._call, weights, caches, tree, (root, first), nodes)
        offer_candidates(tree, nodes, logits, knots)
        return (nodes,)


class FinishStep(StepModule):
    """Attach the last level: its nodes are leaves, so the drafter need not read them."""

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], place: Tensor, rows: Tensor, *tree_buffers: Tensor
    ) -> tuple[Tensor]:
        return (attach_best(TokenTree(*tree_buffers), place[1:], rows.shape[0]),)


class ReadStep(CallStep[ModelCall]):
    """Run W attached nodes through the drafter for their keys and values alone: the tail draft."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: the root's position, number of the first node
        rows: Tensor,  # [W] int64, 0 .. W-1
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        root, first = place[:1], place[1:]
        nodes = first + rows
        last = rows[-1:].clone()
        read_nodes(self._call, weights, caches, tree, (root, first), nodes, last)
        return (nodes,)


class GuessStep(CallStep[ModelCall]):
    """Read a possible successor of each of W nodes before acceptance: the head draft ahead of time.

    Row r lives in the slot behind the tree's, N + r. Candidates go to a table of their own, not into the tree.
    """

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [1] int64: the root's position
        nodes: Tensor,  # [W] int64
        tokens: Tensor,  # [W] int64, the guessed successor of each
        edges: Tensor,  # [W, K] float32, written
        candidates: Tensor,  # [W, K] int64, written
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
    """Plant the accepted successor as the next root, with the candidates read ahead of time."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        row: Tensor,  # [1] int64
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
