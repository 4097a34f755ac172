"""The compiled steps of the target: one plain token, and one verified tree.

Dims: W verified nodes (root included), N tree nodes, V vocabulary, H hidden size.
"""

import torch
from torch import Tensor, nn

from yggdrasil.acceptance.greedy import accept_greedy
from yggdrasil.models.runner import ModelCall
from yggdrasil.tree.token_tree import TokenTree


class PlainStep(nn.Module):
    """Read one certain token and choose the next: plain decoding, and the baseline of every comparison."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self._call = (call,)

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], token: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """``token`` and ``position`` [1] int64. Returns (choice [1], its logit [1], hidden [1, H], *layers [1, H])."""
        offsets = position.expand(2).contiguous()
        mask = torch.ones(1, 1, dtype=torch.bool, device=token.device)
        logits, hidden, layers = self._call[0](weights, caches, token, position, mask, offsets)
        best, choice = logits.max(-1)
        return choice, best, hidden.float(), *layers


class VerifyStep(nn.Module):
    """Run the W best nodes of a tree through the target and accept along its choices."""

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
        """Returns (summary [2 + 4W] int64, hidden [W, H], *layers [W, H]).

        The summary is all that the host must read: accepted rows (root included), whether their logits are finite,
        then W rows and W target choices of which the first ``accepted`` count, then every row's choice and node.
        """
        tree, width = TokenTree(*tree_buffers), self._width
        nodes = order[:width].sort().values  # parents before children
        tokens = tree.tokens[nodes]
        ancestors = tree.ancestors[nodes][:, nodes]  # [W, W]
        exists = torch.isfinite(tree.scores[nodes])
        row_of = torch.zeros_like(tree.tokens).index_copy(0, nodes, torch.arange(width, device=nodes.device))
        offsets = root.expand(2).contiguous()
        logits, hidden, layers = self._call[0](weights, caches, tokens, root + tree.depths[nodes], ancestors, offsets)
        best, choices = logits.max(-1)
        _, path = accept_greedy(tokens, row_of[tree.parents[nodes]], ancestors, exists, choices)
        rows = torch.arange(width, device=nodes.device)
        accepted = torch.where(path, rows, width).sort().values.clamp(max=width - 1)
        finite = torch.isfinite(torch.where(path, best, 0.0)).all()
        summary = torch.cat(
            [path.sum()[None], finite.to(torch.int64)[None], accepted, choices[accepted], choices, nodes]
        )
        return summary, hidden.float(), *layers
