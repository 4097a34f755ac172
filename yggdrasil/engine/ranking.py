"""Ranks a tree's nodes by score, and sums the expected tokens of the best of them; runs in every iteration."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.native import is_native
from yggdrasil.native.direct import direct, native_ranking
from yggdrasil.runtime.buffers import HostView
from yggdrasil.tree.token_tree import TokenTree


class Ranking:
    """Of one tree's nodes, ties to the lower number, written into ``order`` where one is given.

    Dims: N nodes, V verify widths.
    """

    def __init__(self, tree: TokenTree, verify_widths: Sequence[int], order: Tensor | None = None) -> None:
        device = tree.scores.device
        order = torch.empty_like(tree.parents) if order is None else order
        self._buffers = tree.scores, tree.depths, order
        self._widths = torch.tensor(verify_widths)
        self._totals = torch.ones(len(verify_widths), dtype=torch.float64)
        self._levels = torch.zeros(len(verify_widths), dtype=torch.int64)
        self._order = HostView(order)
        self._given: Any = self._totals.numpy().data  # as a list sooner than the array is
        self._deepest: memoryview = self._levels.numpy().data
        self._places = {width: place for place, width in enumerate(verify_widths)}
        self._rank: Callable[[], int] = self._rank_portably
        if device.type == "cpu" and is_native():
            self._native = native_ranking(*self._buffers, self._widths, self._totals, self._levels)
            self._rank = direct("rank", self._native)

    def rank(self) -> list[float]:
        """Rank the nodes; returns the tokens to expect at each verify width by their scores, bonus included."""
        if self._rank() < 0:
            raise RuntimeError("the tree could not be ranked")
        totals: list[float] = self._given.tolist()
        return totals

    def depth(self, width: int) -> int:
        """Levels of the best ``width`` nodes, a verify width."""
        deepest: int = self._deepest[self._places[width]]
        return deepest

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Nodes from best to worst, [N]."""
        return self._order.read()

    def _rank_portably(self) -> int:
        scores, depths, order = self._buffers
        best, nodes = scores.sort(descending=True, stable=True)
        order.copy_(nodes)
        levels = torch.where(best.isfinite(), depths[nodes], 0).cummax(0).values
        last = self._widths - 1
        self._totals.copy_(best.double().exp().cumsum(0).cpu()[last])
        self._levels.copy_(levels.cpu()[last])
        return 0
