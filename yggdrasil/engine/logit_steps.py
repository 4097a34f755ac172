"""Compiled steps of the target for requests that decide on the host: the same passes, with their logits returned.

Dims: W verified nodes (root included), N tree nodes, V vocabulary, H hidden size.
"""

import torch
from torch import Tensor

from yggdrasil.engine.steps import read_token, read_tree
from yggdrasil.runtime.forward import ModelCall
from yggdrasil.runtime.traced import CallStep
from yggdrasil.tree.token_tree import TokenTree


class PlainLogitsStep(CallStep[ModelCall]):
    """Read one certain token."""

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], token: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """``token`` and ``position`` [1] int64. Returns (logits [1, V], hidden [1, H], *layers [1, H])."""
        found = read_token(self._call, weights, caches, token, position)
        return found.logits, found.hidden.float(), *found.layers


class VerifyLogitsStep(CallStep[ModelCall]):
    """Run the W best nodes of a tree through the target."""

    wide = (1,)

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        root: Tensor,  # [1] int64, the root's position
        chosen: Tensor,  # [W] int64, nodes
        *tree_buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns (layout [4, W] int64, logits [W, V], hidden [W, H], *layers [W, H]).

        The layout's rows are nodes, tokens, parent rows, and 1 where the row exists (0: padding).
        """
        tree = TokenTree(*tree_buffers)
        rows, found = read_tree(self._call, weights, caches, root, chosen, tree)
        layout = torch.stack([rows.nodes, rows.tokens, rows.parents, rows.exist.to(torch.int64)])
        return layout, found.logits, found.hidden.float(), *found.layers
