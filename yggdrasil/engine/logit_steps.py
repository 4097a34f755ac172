"""Compiled steps of the target for requests that decide on the host: the same passes, with their logits returned.

Dims: W verified nodes (root included), N tree nodes, V vocabulary, H hidden size.
"""

import torch
from torch import Tensor, nn

from yggdrasil.models.runner import ModelCall
from yggdrasil.tree.token_tree import TokenTree


class PlainLogitsStep(nn.Module):
    """Read one certain token."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self._call = (call,)

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], token: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """``token`` and ``position`` [1] int64. Returns (logits [1, V], hidden [1, H], *layers [1, H])."""
        offsets = position.expand(2).contiguous()
        mask = torch.ones(1, 1, dtype=torch.bool, device=token.device)
        logits, hidden, layers = self._call[0](weights, caches, token, position, mask, offsets)
        return logits, hidden.float(), *layers


class VerifyLogitsStep(nn.Module):
    """Run the W best nodes of a tree through the target."""

    def __init__(self, call: ModelCall, width: int) -> None:
        super().__init__()
        self._call, self._width = (call,), width

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        root: Tensor,  # [1] int64, the root's position
        order: Tensor,  # [N] int64, nodes from best to worst
        *tree_buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns (layout [4, W] int64, logits [W, V], hidden [W, H], *layers [W, H]).

        The layout's rows are nodes, tokens, parent rows, and 1 where the row exists (0: padding).
        """
        tree, width = TokenTree(*tree_buffers), self._width
        nodes = order[:width].sort().values  # parents before children
        tokens = tree.tokens[nodes]
        ancestors = tree.ancestors[nodes][:, nodes]  # [W, W]
        exists = torch.isfinite(tree.scores[nodes])
        row_of = torch.zeros_like(tree.tokens).index_copy(0, nodes, torch.arange(width, device=nodes.device))
        offsets = root.expand(2).contiguous()
        logits, hidden, layers = self._call[0](weights, caches, tokens, root + tree.depths[nodes], ancestors, offsets)
        layout = torch.stack([nodes, tokens, row_of[tree.parents[nodes]], exists.to(torch.int64)])
        return layout, logits, hidden.float(), *layers
