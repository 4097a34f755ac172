"""The tree that costs no pass, grown beside the drafter's own before anything is decided."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from yggdrasil.drafters.protocol import FreeDrafter
from yggdrasil.models.buffers import HostView
from yggdrasil.tree.token_tree import TokenTree


class AsideTree:
    """What ``free`` guesses, in a tree of its own until it is chosen to be ``tree``'s content.

    A drafter may have planted the next root in ``tree`` already, which must not be lost for a look at other guesses.
    Where there is none (``is_alone``) they grow in ``tree`` itself, if that is on the host.
    """

    def __init__(
        self, free: FreeDrafter, tree: TokenTree, verify_widths: Sequence[int], *, is_alone: bool = False
    ) -> None:
        self._free, self._tree = free, tree
        is_in_place = is_alone and tree.tokens.device.type == "cpu"
        self._own = tree if is_in_place else TokenTree.on_host(tree.num_nodes)
        self._ranking = torch.empty_like(self._own.parents), torch.empty_like(self._own.scores)
        self._ranked, self._expected = map(HostView, self._ranking)
        self._scores, self._depths = HostView(self._own.scores), HostView(self._own.depths)
        self._last = np.array(verify_widths) - 1

    def grow(self, depth: int) -> list[float]:
        """Guess anew; returns the tokens to expect at each verify width by the scores, bonus included."""
        self._free.plant(self._own, depth)
        torch.ops.yggdrasil.rank_nodes.default(self._own.scores, *self._ranking)
        totals: list[float] = self._expected.read()[self._last].tolist()
        return totals

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Nodes from best to worst."""
        return self._ranked.read()

    def use(self) -> None:
        """Make it the tree of this iteration."""
        if self._own is not self._tree:
            self._tree.take_nodes(self._own)

    def depth(self, width: int) -> int:
        """Levels of the best ``width`` nodes."""
        best = self.order[:width]
        return int(self._depths.read()[best][np.isfinite(self._scores.read()[best])].max())
