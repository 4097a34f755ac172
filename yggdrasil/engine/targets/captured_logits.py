"""Target passes as CUDA graphs that copy their logits to the host, for requests that accept on the host.

Each pass is one launch, one transfer and one wait. Moving accepted rows is one more launch. Dims: W rows of a pass, V
vocabulary, H hidden size.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.passes import HostCopies
from yggdrasil.runtime.runner import CapturedMover, ModelRunner
from yggdrasil.tree.token_tree import TokenTree, rank_nodes


class CapturedLogits:
    """CUDA graphs of a plain step and of tree passes of ``widths`` rows, whose logits are copied to the host.

    ``order`` [N] int64 receives the ranked nodes, and ``start`` [1] int64 is the root's position. Callers write the
    steps' inputs.
    """

    def __init__(
        self, runner: ModelRunner, tree: TokenTree, order: Tensor, start: Tensor, widths: Sequence[int]
    ) -> None:
        assert runner.recorder is not None
        device = runner.loaded.device
        self._runner, self._tree, self._order, self._start = runner, tree, order, start
        self._move = CapturedMover(runner.cache, runner.recorder, max(1, *widths))
        self._plain = runner.recorder.capture(runner.step("plain-logits", 1))
        self._trees = {width: runner.recorder.capture(partial(self._tree_pass, width)) for width in widths if width > 1}
        self._copies = HostCopies(device)
        self.expected = 1.0  # expected tokens of the last tree, bonus token included

    def captures(self) -> Iterator[Capture]:
        """Yield all CUDA graphs of this object. Each must be prepared (run once) between requests."""
        yield from (self._plain, *self._trees.values(), self._move.capture)

    def plain(self) -> Sequence[Tensor]:
        """Run the committed token that the caller has written to the inputs through the target, as one CUDA graph.

        Return logits [1, V] and hidden states [1, H] on the host, then [1, H] of each layer that a drafter reads, on
        the device.
        """
        logits, hidden, *layers = self._plain()
        return *self._copies.read([logits, hidden]), *layers

    def tree(self, width: int) -> Sequence[Tensor]:
        """Rank the tree's nodes and run the ``width`` best through the target, as one CUDA graph.

        Return the layout [4, W] int64 (nodes, tokens, parents' rows, existence), logits [W, V] and hidden states [W, H]
        on the host, then [W, H] of each layer that a drafter reads, on the device.
        """
        expected, layout, logits, hidden, *layers = self._trees[width]()
        expected, layout, logits, hidden = self._copies.read([expected, layout, logits, hidden])
        self.expected = float(expected)
        return layout, logits, hidden, *layers

    def move_rows(self, start: int, rows: Sequence[int]) -> None:
        """Move the KV entries of the accepted ``rows`` of the last pass to consecutive cache slots from ``start`` on.

        Args:
            start: the slot of the pass's first row.
            rows: row indices of the pass, ascending.
        """
        if rows and rows[-1] >= len(rows):  # else each is already at its slot
            self._move([start + row for row in rows], start)

    def _tree_pass(self, width: int) -> Sequence[Tensor]:
        order, expected = rank_nodes(self._tree)
        self._order.copy_(order)
        return expected[width - 1 : width], *self._runner.step("verify-logits", width)()
