"""The compiled steps of a draft model: read what is certain, grow one level.

Dims: W rows, N tree nodes, M calibration knots.
"""

import torch
from torch import Tensor, nn

from yggdrasil.models.runner import ModelCall
from yggdrasil.tree.growth import attach_best, likeliest, offer, offer_candidates, plant_root
from yggdrasil.tree.token_tree import TokenTree


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


class HeadStep(nn.Module):
    """Read the newly certain tokens (padded to W), plant the last as root, offer its continuations.

    The rows before the root are tokens whose keys the drafter may lack or hold at a tree slot; reading them all again
    costs a memory-bound model the price of one token and spares it moving its cache.
    """

    def __init__(self, call: ModelCall, width: int) -> None:
        super().__init__()
        self._call, self._width = (call,), width

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
        rows = torch.arange(self._width, device=tokens.device)
        last = count - 1
        mask = rows[:, None] >= rows[None, :]
        offsets = start.expand(2).contiguous()
        logits = self._call[0](weights, caches, tokens, start + rows, mask, offsets, last).logits
        plant_root(tree, tokens[last])
        offer_candidates(tree, torch.zeros_like(last), logits, knots)
        return (last,)


class GrowStep(nn.Module):
    """Attach the W best candidates, run them through the drafter, offer their continuations."""

    def __init__(self, call: ModelCall, width: int) -> None:
        super().__init__()
        self._call, self._width = (call,), width

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: the root's position, number of the first new node
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        root, first = place[:1], place[1:]
        nodes = attach_best(tree, first, self._width)
        logits = read_nodes(self._call[0], weights, caches, tree, (root, first), nodes)
        offer_candidates(tree, nodes, logits, knots)
        return (nodes,)


class FinishStep(nn.Module):
    """Attach the last level: its nodes are leaves, so the drafter need not read them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], place: Tensor, *tree_buffers: Tensor
    ) -> tuple[Tensor]:
        return (attach_best(TokenTree(*tree_buffers), place[1:], self._width),)


class ReadStep(nn.Module):
    """Run W attached nodes through the drafter for their keys and values alone: the tail draft."""

    def __init__(self, call: ModelCall, width: int) -> None:
        super().__init__()
        self._call, self._width = (call,), width

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: the root's position, number of the first node
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        root, first = place[:1], place[1:]
        nodes = first + torch.arange(self._width, device=first.device)
        last = torch.full_like(first, self._width - 1)
        read_nodes(self._call[0], weights, caches, tree, (root, first), nodes, last)
        return (nodes,)


class GuessStep(nn.Module):
    """Read what may follow each of W nodes, before it is known which of them stand: the head draft ahead of time.

    Row r lives in the slot behind the tree's, N + r. Candidates go to a table of their own, not into the tree.
    """

    def __init__(self, call: ModelCall, width: int) -> None:
        super().__init__()
        self._call, self._width = (call,), width

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [1] int64: the root's position
        nodes: Tensor,  # [>= W] int64
        tokens: Tensor,  # [>= W] int64, the guessed successor of each
        edges: Tensor,  # [>= W, K] float32, written
        candidates: Tensor,  # [>= W, K] int64, written
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree, width = TokenTree(*tree_buffers), self._width
        above = nodes[:width]
        itself = torch.eye(width, dtype=torch.bool, device=nodes.device)
        mask = torch.cat([tree.ancestors[above], itself], dim=1)  # [W, N + W]
        offsets = torch.cat([place, place + tree.num_nodes])
        positions = place + tree.depths[above] + 1
        logits = self._call[0](weights, caches, tokens[:width].clone(), positions, mask, offsets).logits
        found = likeliest(logits, tree.candidates)
        edges[:width] = found[0]
        candidates[:width] = found[1]
        return (above.clone(),)


class PlantStep(nn.Module):
    """Plant the guess that came true as the next root, with the candidates read ahead of time."""

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
