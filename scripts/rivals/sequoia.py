"""Sequoia's static tree (Chen et al. 2024, section 3.1): optimal for an acceptance vector and the hardware's costs.

``acceptance[j]`` is the probability that the drafter's j-th best token is the target's, given that its parent was
accepted. A node's value is the product along its path (1 for the root); a tree's value is the sum over its nodes, the
expected tokens per pass. Dims: K ranks, N nodes, D depth.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rivals.protocol import StaticGrowth, StaticTree
from yggdrasil.policy.costs import StepCosts


class SequoiaTables:
    """The dynamic program for all sizes up to N and depths up to D; O(D K N^2)."""

    def __init__(self, acceptance: Sequence[float], max_nodes: int, max_depth: int) -> None:
        """Check the arguments. ``max_nodes`` includes the root, which has depth 0.

        Raises:
            ValueError: a probability is outside [0, 1], or there is no room for a root.
        """
        if max_nodes < 1 or max_depth < 0:
            raise ValueError(f"a tree needs a root, got {max_nodes = }, {max_depth = }")
        if not all(0.0 <= p <= 1.0 for p in acceptance):
            raise ValueError(f"acceptance must be probabilities, got {list(acceptance)}")
        self.acceptance = tuple(acceptance)
        self.max_nodes, self.max_depth = max_nodes, max_depth

    @cached_property
    def _tables(self) -> npt.NDArray[np.float64]:
        """Value of the best tree, [D + 1, K + 1, N + 1]: by maximum depth, ranks that the root may use, and size."""
        ranks, size = len(self.acceptance), self.max_nodes
        table = np.full((self.max_depth + 1, ranks + 1, size + 1), -np.inf)
        table[:, :, 1] = 1.0
        for depth in range(1, self.max_depth + 1):
            child = table[depth - 1, ranks]
            for rank in range(1, ranks + 1):
                without = table[depth, rank - 1]
                best = without.copy()
                if self.acceptance[rank - 1] == 0.0:
                    table[depth, rank] = best
                    continue
                for share in range(1, size):  # nodes below the child of this rank, itself included
                    gain = self.acceptance[rank - 1] * child[share]
                    np.maximum(best[share + 1 :], without[1 : size + 1 - share] + gain, out=best[share + 1 :])
                table[depth, rank] = best
        return table

    def value(self, num_nodes: int, depth: int) -> float:
        """Return the expected tokens per pass of the best tree of exactly ``num_nodes``; -inf if none exists."""
        return float(self._tables[depth, -1, num_nodes])

    def tree(self, num_nodes: int, depth: int) -> StaticTree:
        """Return the best tree of exactly ``num_nodes`` within ``depth``. Raises ValueError if none exists."""
        if not np.isfinite(self.value(num_nodes, depth)):
            raise ValueError(f"{num_nodes} nodes do not fit into depth {depth} with {len(self.acceptance)} ranks")
        return StaticTree.from_paths(self._paths((), num_nodes, depth))

    def _paths(self, root: tuple[int, ...], num_nodes: int, depth: int) -> list[tuple[int, ...]]:
        paths: list[tuple[int, ...]] = []
        for rank in range(len(self.acceptance), 0, -1):
            share = self._share(num_nodes, depth, rank)
            if share:
                child = (*root, rank - 1)
                paths += [child, *self._paths(child, share, depth - 1)]
                num_nodes -= share
        return paths

    def _share(self, num_nodes: int, depth: int, rank: int) -> int:
        """Return the size of the subtree of the child of ``rank`` in the best tree; 0 if that child is not used."""
        if depth == 0:
            return 0
        with_rank, without = self._tables[depth, rank], self._tables[depth, rank - 1]
        if with_rank[num_nodes] == without[num_nodes]:
            return 0
        child = self._tables[depth - 1, -1]
        shares = np.arange(1, num_nodes)
        values = without[num_nodes - shares] + self.acceptance[rank - 1] * child[shares]
        return int(shares[values.argmax()])


class SequoiaChoice(NamedTuple):
    """The fastest size and depth, with expected tokens per pass and milliseconds per token."""

    num_nodes: int
    depth: int
    expected_tokens: float
    ms_per_token: float


def choose_size(tables: SequoiaTables, costs: StepCosts, widths: Sequence[int]) -> SequoiaChoice:
    """Return the size and depth with the least time per token (the hardware-aware part, section 3.3).

    A level is drafted in steps of the widest of ``widths``; sizes are the verify widths.

    Raises:
        ValueError: no verify width makes a tree.
    """
    widest = max(widths)
    choices = []
    for depth in range(1, tables.max_depth + 1):
        for size in costs.verify_widths:
            if not 1 < size <= tables.max_nodes or not np.isfinite(tables.value(size, depth)):
                continue
            levels = np.bincount(tables.tree(size, depth).depths)[1:-1]  # the last level is not read
            steps = int(np.ceil(levels / widest).sum())
            drafting = costs.head_ms + steps * costs.draft_ms[widest]
            total = drafting + costs.verify_ms[size] + costs.overhead_ms
            value = tables.value(size, depth)
            choices.append(SequoiaChoice(size, depth, value, total / value))
    if not choices:
        raise ValueError(f"no verify width of {costs.verify_widths} makes a tree")
    return min(choices, key=lambda choice: choice.ms_per_token)


def sequoia(tables: SequoiaTables, num_nodes: int) -> StaticGrowth:
    """Return the best tree of at most ``num_nodes`` (root included), as large as the depth allows."""
    size = max(n for n in range(1, num_nodes + 1) if np.isfinite(tables.value(n, tables.max_depth)))
    return StaticGrowth(f"Sequoia, {size - 1} nodes", tables.tree(size, tables.max_depth))
