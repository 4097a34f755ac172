"""Captured passes that copy their logits to the host, for requests that accept on the host.

Each pass is one launch, one transfer and one wait. Moving accepted rows is one more launch.
Dims: W rows of a pass, V vocabulary, H hidden size.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from yggdrasil.runtime.buffers import HostCopies
from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.runner import CapturedMover, ModelRunner
from yggdrasil.tree.growth import rank_nodes
from yggdrasil.tree.token_tree import TokenTree


class CapturedLogits:
    """Captures of the runner's steps "plain-logits" and "verify-logits". Callers write the steps' inputs."""

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
        """Yield all captures, to be prepared between requests."""
        yield from (self._plain, *self._trees.values(), self._move.capture)

    def plain(self) -> Sequence[Tensor]:
        """Run ``PlainLogitsStep`` and return its outputs: on the host, except *layers, which stay on the device."""
        logits, hidden, *layers = self._plain()
        return *self._copies.read([logits, hidden]), *layers

    def tree(self, width: int) -> Sequence[Tensor]:
        """Run ``VerifyLogitsStep`` over the ``width`` best nodes. Return its outputs as ``plain`` does."""
        expected, layout, logits, hidden, *layers = self._trees[width]()
        expected, layout, logits, hidden = self._copies.read([expected, layout, logits, hidden])
        self.expected = float(expected)
        return layout, logits, hidden, *layers

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Move the accepted ``rows`` of the last pass, in ascending order, to the slots from ``start``."""
        if rows and rows[-1] >= len(rows):  # else each is already at its slot
            self._move([start + row for row in rows], start)

    def _tree_pass(self, width: int) -> Sequence[Tensor]:
        order, expected = rank_nodes(self._tree)
        self._order.copy_(order)
        return expected[width - 1 : width], *self._runner.step("verify-logits", width)()
