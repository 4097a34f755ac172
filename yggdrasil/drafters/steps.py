"""The compiled steps of a draft model: read what is certain, grow one level.

Dims: W rows, N tree nodes, M calibration knots.
"""

import torch
from torch import Tensor, nn

from yggdrasil.models.runner import ModelCall
from yggdrasil.tree.growth import attach_best, offer_candidates, plant_root
from yggdrasil.tree.token_tree import TokenTree


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
        offsets = torch.cat([root, root + first])  # node i lives in slot root + i
        positions = root + tree.depths[nodes]
        logits = self._call[0](weights, caches, tree.tokens[nodes], positions, tree.ancestors[nodes], offsets).logits
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
