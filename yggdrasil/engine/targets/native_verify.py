"""Verification steps over fixed buffers: selecting and accepting rows are one native call each.

Dims: W verified nodes (root included), N tree nodes, V vocabulary, H hidden size.
"""

from collections.abc import Sequence

from torch import Tensor

from yggdrasil.engine.targets.steps import VerifyLogitsStep, VerifyStep
from yggdrasil.native.direct import VerifiedRows, direct
from yggdrasil.runtime.passes import Forward, ModelCall
from yggdrasil.tree.token_tree import TokenTree


class _NativeRows:
    """The rows of a step's passes, in buffers that every pass overwrites."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._rows: VerifiedRows | None = None

    def run(
        self, weights: list[Tensor], caches: list[Tensor], root: Tensor, chosen: Tensor, tree_buffers: Sequence[Tensor]
    ) -> tuple[VerifiedRows, Forward]:
        """Run the nodes ``chosen`` of a tree through the model, as ``read_tree`` does.

        Every call must pass the same buffers as the first.
        """
        if self._rows is None:  # every call has the buffers with which the step was defined
            tree = TokenTree(*tree_buffers)
            self._rows = VerifiedRows(
                chosen, root, (tree.tokens, tree.parents, tree.depths, tree.scores, tree.ancestors)
            )
            self._select, self._accept = direct("select_rows", self._rows), direct("accept_rows", self._rows)
        rows = self._rows
        self._select()
        return rows, self._call(weights, caches, rows.tokens, rows.positions, rows.ancestors, rows.offsets)

    def accept(self) -> None:
        """Write the summary of the last pass from its argmax tokens and their logits."""
        self._accept()


class NativeVerifyStep(VerifyStep):
    """``VerifyStep`` over fixed buffers: selecting and accepting rows are one native call each."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__(call)
        self._native = _NativeRows(call)

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        root: Tensor,
        chosen: Tensor,
        *tree_buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run nodes of a tree through the target, write their KV entries, and accept the path of argmax tokens.

        Arguments and results are those of ``VerifyStep.forward``, with fewer calls in between. Every call must pass the
        same buffers as the first. The next call overwrites the summary.

        Args:
            root: [1] int64, the root's index in the request, counted from the first prompt token.
            chosen: [W] int64, node indices in any order.
            tree_buffers: ``TokenTree.tensors``.

        Returns:
            (summary [2 + 4W] int64, hidden [W, H] float32, [W, H] of each layer that a drafter reads)
        """
        rows, found = self._native.run(weights, caches, root, chosen, tree_buffers)
        best, choices = found.best_tokens()
        rows.best.copy_(best)
        rows.choices.copy_(choices)
        self._native.accept()
        return rows.summary, found.hidden.float(), *found.layers


class NativeVerifyLogitsStep(VerifyLogitsStep):
    """``VerifyLogitsStep`` over fixed buffers: selecting rows is one native call."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__(call)
        self._native = _NativeRows(call)

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        root: Tensor,
        chosen: Tensor,
        *tree_buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run nodes of a tree through the target, write their KV entries, and accept none.

        Arguments and results are those of ``VerifyLogitsStep.forward``, with fewer calls in between. Every call must
        pass the same buffers as the first. The next call overwrites the layout.

        Args:
            root: [1] int64, the root's index in the request, counted from the first prompt token.
            chosen: [W] int64, node indices in any order.
            tree_buffers: ``TokenTree.tensors``.

        Returns:
            (rows as ``layout_of`` packs them, logits [W, V], hidden [W, H] float32, [W, H] of each layer that a drafter
                reads)
        """
        rows, found = self._native.run(weights, caches, root, chosen, tree_buffers)
        return rows.layout, found.logits, found.hidden.float(), *found.layers
