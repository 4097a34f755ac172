"""Captured passes whose logits come to the host: what requests need that sample, or that ask for log-probabilities.

Each pass is one launch, one transfer and one wait; accepted rows are kept by one more launch.
Dims: W rows of a pass, V vocabulary, H hidden size.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from yggdrasil.runtime.buffers import HostCopies
from yggdrasil.runtime.forward import RUNNERS_UP
from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.moves import CapturedMover
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.growth import rank_nodes
from yggdrasil.tree.token_tree import TokenTree


class CapturedLogits:
    """Passes over inputs that others write; the steps "plain-logits" and "verify-logits" of ``runner`` are defined."""

    def __init__(
        self, runner: ModelRunner, tree: TokenTree, order: Tensor, start: Tensor, widths: Sequence[int]
    ) -> None:
        assert runner.recorder is not None
        device = runner.loaded.device
        self._runner, self._tree, self._order, self._start = runner, tree, order, start
        self._gives_runners_up = RUNNERS_UP in runner.call.hidden_layers  # the last of a step's outputs then
        self._move = CapturedMover(runner.cache, runner.recorder, max(1, *widths))
        self._plain = runner.recorder.capture(runner.step("plain-logits", 1))
        self._trees = {width: runner.recorder.capture(partial(self._tree_pass, width)) for width in widths if width > 1}
        self._copies = HostCopies(device)
        self.expected = 1.0  # tokens of the last tree, the bonus token included

    def captures(self) -> Iterator[Capture]:
        """All of them, to be prepared between requests."""
        yield from (self._plain, *self._trees.values(), self._move.capture)

    def plain(self) -> Sequence[Tensor]:
        """Outputs of ``PlainLogitsStep``: on the host, the layers' states for drafters on the device."""
        logits, hidden, *layers = self._plain()
        (logits, hidden), layers = self._on_host([logits, hidden], layers)
        return logits, hidden, *layers

    def tree(self, width: int) -> Sequence[Tensor]:
        """Outputs of ``VerifyLogitsStep`` over the ``width`` best nodes, as ``plain`` gives them."""
        expected, layout, logits, hidden, *layers = self._trees[width]()
        (expected, layout, logits, hidden), layers = self._on_host([expected, layout, logits, hidden], layers)
        self.expected = float(expected)
        return layout, logits, hidden, *layers

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Move accepted ``rows`` of the last pass, which ascend, to the slots from ``start`` on."""
        if rows and rows[-1] >= len(rows):  # else every one is where it belongs
            self._move([start + row for row in rows], start)

    def _on_host(self, wanted: list[Tensor], layers: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if self._gives_runners_up:
            *copied, runners_up = self._copies.read([*wanted, layers[-1]])
            return copied, [*layers[:-1], runners_up]
        return self._copies.read(wanted), layers

    def _tree_pass(self, width: int) -> Sequence[Tensor]:
        order, expected = rank_nodes(self._tree)
        self._order.copy_(order)
        return expected[width - 1 : width], *self._runner.step("verify-logits", width)()
