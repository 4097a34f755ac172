"""The compiled steps of the target: one plain token, and one verified tree.

Dims: W verified nodes (root included), N tree nodes, V vocabulary, H hidden size.
"""

from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.acceptance.greedy import accept_greedy
from yggdrasil.acceptance.tensor_sampling import SamplingKind, choose, counts_on_path
from yggdrasil.native.direct import VerifiedRows, direct
from yggdrasil.runtime.forward import Forward, ModelCall
from yggdrasil.runtime.traced import CallStep
from yggdrasil.tree.token_tree import TokenTree


class PlainLogitsStep(CallStep[ModelCall]):
    """Run one committed token and return its logits."""

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], token: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """Return (logits [1, V], hidden [1, H], *layers [1, H]). ``token`` and ``position`` are [1] int64."""
        found = read_token(self._call, weights, caches, token, position)
        return found.logits, found.hidden.float(), *found.layers


class VerifyLogitsStep(CallStep[ModelCall]):
    """Run the W best nodes of a tree and return their logits."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        root: Tensor,  # [1] int64, the root's position
        chosen: Tensor,  # [W] int64, nodes
        *tree_buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return (layout [4, W] int64, logits [W, V], hidden [W, H], *layers [W, H]).

        The rows of the layout are: nodes, tokens, parents' rows, and 1 for existing rows or 0 for padding.
        """
        tree = TokenTree(*tree_buffers)
        rows, found = read_tree(self._call, weights, caches, root, chosen, tree)
        layout = torch.stack([rows.nodes, rows.tokens, rows.parents, rows.exist.to(torch.int64)])
        return layout, found.logits, found.hidden.float(), *found.layers


class TreeRows(NamedTuple):
    """The rows of a pass over a tree. Row 0 is the root, and parents come before children."""

    nodes: Tensor  # [W] int64
    tokens: Tensor  # [W] int64
    parents: Tensor  # [W] int64, rows
    ancestors: Tensor  # [W, W] bool, rows
    exist: Tensor  # [W] bool, false for padding


def read_token(
    call: ModelCall, weights: list[Tensor], caches: list[Tensor], token: Tensor, position: Tensor
) -> Forward:
    """Run one committed token through the target. ``token`` and ``position`` are [1] int64."""
    mask = torch.ones(1, 1, dtype=torch.bool, device=token.device)
    return call(weights, caches, token, position, mask, position.expand(2).contiguous())


def read_tree(
    call: ModelCall, weights: list[Tensor], caches: list[Tensor], root: Tensor, chosen: Tensor, tree: TokenTree
) -> tuple[TreeRows, Forward]:
    """Run the nodes ``chosen`` [W] of a tree, with tree attention. ``root`` [1] is the root's position."""
    nodes = chosen.sort().values  # parents before children
    width = nodes.shape[0]
    row_of = torch.zeros_like(tree.tokens).index_copy(0, nodes, torch.arange(width, device=nodes.device))
    rows = TreeRows(
        nodes=nodes,
        tokens=tree.tokens[nodes],
        parents=row_of[tree.parents[nodes]],
        ancestors=tree.ancestors[nodes][:, nodes],
        exist=torch.isfinite(tree.scores[nodes]),
    )
    offsets = root.expand(2).contiguous()
    return rows, call(weights, caches, rows.tokens, root + tree.depths[nodes], rows.ancestors, offsets)


class PlainStep(CallStep[ModelCall]):
    """Run one committed token and choose the next: plain decoding, the baseline of every comparison."""

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], token: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """Return (token [1], its logit [1], hidden [1, H], *layers [1, H]). The inputs are [1] int64."""
        found = read_token(self._call, weights, caches, token, position)
        best, choice = found.best_tokens()
        return choice, best, found.hidden.float(), *found.layers


class VerifyStep(CallStep[ModelCall]):
    """Run the W best nodes of a tree and accept the path that the target's argmax tokens follow."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        root: Tensor,  # [1] int64, the root's position
        chosen: Tensor,  # [W] int64, nodes
        *tree_buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return (summary [2 + 4W] int64, hidden [W, H], *layers [W, H]).

        The summary is all that the host reads: the number of accepted rows (root included), whether their logits are
        finite, W accepted rows and W target tokens after them (valid up to that number), then the target's token after
        every row and every row's node.
        """
        rows, found = read_tree(self._call, weights, caches, root, chosen, TokenTree(*tree_buffers))
        best, choices = found.best_tokens()
        return _summary(rows, best, choices), found.hidden.float(), *found.layers


def _summary(rows: TreeRows, best: Tensor, choices: Tensor) -> Tensor:
    """Accept greedily and return the summary of ``VerifyStep`` [2 + 4W], from every row's best logit and token [W]."""
    width = choices.shape[0]
    _, path = accept_greedy(rows.tokens, rows.parents, rows.ancestors, rows.exist, choices)
    numbers = torch.arange(width, device=path.device)
    accepted = torch.where(path, numbers, width).sort().values.clamp(max=width - 1)
    finite = torch.isfinite(torch.where(path, best, 0.0)).all()
    return torch.cat([path.sum()[None], finite.to(torch.int64)[None], accepted, choices[accepted], choices, rows.nodes])


class SampledPlainStep(CallStep[ModelCall]):
    """``PlainStep`` with a sampled token."""

    def __init__(self, call: ModelCall, kind: SamplingKind) -> None:
        super().__init__(call)
        self._kind = kind

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], token: Tensor, position: Tensor, *sampling: Tensor
    ) -> tuple[Tensor, ...]:
        """Return what ``PlainStep`` returns. ``sampling`` are the fields of ``SamplingTensors``."""
        found = read_token(self._call, weights, caches, token, position)
        choice = choose(self._kind, found.logits, position + 1, None, sampling)
        return choice, found.logits.amax(-1), found.hidden.float(), *found.layers


class SampledVerifyStep(CallStep[ModelCall]):
    """``VerifyStep`` with sampled tokens. The random numbers depend on the position only, not on the tree."""

    def __init__(self, call: ModelCall, kind: SamplingKind) -> None:
        super().__init__(call)
        self._kind = kind

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        root: Tensor,  # [1] int64, the root's position
        chosen: Tensor,  # [W] int64, nodes
        *buffers: Tensor,  # fields of the tree, then of ``SamplingTensors``
    ) -> tuple[Tensor, ...]:
        """Return what ``VerifyStep`` returns."""
        num_tree = len(fields(TokenTree))
        tree, sampling = TokenTree(*buffers[:num_tree]), buffers[num_tree:]
        rows, found = read_tree(self._call, weights, caches, root, chosen, tree)
        logits = found.logits
        path_counts = counts_on_path(rows.tokens, rows.ancestors, logits.shape[1]) if self._kind.shapes else None
        choices = choose(self._kind, logits, root + tree.depths[rows.nodes] + 1, path_counts, sampling)
        return _summary(rows, logits.amax(-1), choices), found.hidden.float(), *found.layers


class NativeVerifyStep(VerifyStep):
    """``VerifyStep`` over fixed buffers: selecting and accepting rows are one native call each."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__(call)
        self._rows: VerifiedRows | None = None

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        root: Tensor,
        chosen: Tensor,
        *tree_buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return what ``VerifyStep`` returns. The next call overwrites the summary."""
        if self._rows is None:  # every call has the buffers with which the step was defined
            tree = TokenTree(*tree_buffers)
            self._rows = VerifiedRows(
                chosen, root, (tree.tokens, tree.parents, tree.depths, tree.scores, tree.ancestors)
            )
            self._select, self._accept = direct("select_rows", self._rows), direct("accept_rows", self._rows)
        rows = self._rows
        self._select()
        found = self._call(weights, caches, rows.tokens, rows.positions, rows.ancestors, rows.offsets)
        best, choices = found.best_tokens()
        rows.best.copy_(best)
        rows.choices.copy_(choices)
        self._accept()
        return rows.summary, found.hidden.float(), *found.layers
