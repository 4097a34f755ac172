"""Verify-width pruning by the dynamic programme of the paper (section 4.2): the best connected subtree of each size.

It serves any node values. Values that only fall along a path, as products of probabilities do, have a shortcut
(``growth.rank_nodes``), which tests hold against this.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Subtree(NamedTuple):
    """A connected subtree that contains the root."""

    value: float
    nodes: tuple[int, ...]  # ascending


def best_subtrees(parents: Sequence[int], values: Sequence[float], max_size: int) -> list[Subtree]:
    """The connected subtree of greatest total value for every size 1..``max_size``, root (node 0) included.

    ``parents[i] < i`` for i > 0; ``values`` may have any sign and order. Bottom up: ``best[i][m]`` is the greatest
    value of m nodes taken from the subtree of i with i among them; children are merged one by one, as in a knapsack,
    in O(nodes * max_size^2). Ties keep later-numbered children.
    """
    size = len(parents)
    if not 1 <= max_size <= size:
        raise ValueError(f"max_size must be in 1..{size}, got {max_size}")
    if any(not 0 <= parents[i] < i for i in range(1, size)):
        raise ValueError("a parent must come before its child")
    best: list[NDArray[np.float64]] = [np.array([-np.inf, value]) for value in values]
    merges: list[list[tuple[int, NDArray[np.int64]]]] = [[] for _ in range(size)]
    for node in range(size - 1, 0, -1):
        parent = parents[node]
        best[parent], taken = _merge(best[parent], best[node], max_size)
        merges[parent].append((node, taken))
    return [Subtree(float(best[0][m]), _nodes(merges, m)) for m in range(1, max_size + 1)]


def _merge(
    parent: NDArray[np.float64], child: NDArray[np.float64], max_size: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Best values when up to ``len(child) - 1`` nodes of the child may join, and how many of them did."""
    sizes = min(len(parent) + len(child) - 1, max_size + 1)
    merged = np.full(sizes, -np.inf)
    taken = np.zeros(sizes, dtype=np.int64)
    for count in range(len(child)):
        gain = 0.0 if count == 0 else child[count]
        reach = min(len(parent), sizes - count)
        if reach <= 0:
            break
        total = parent[:reach] + gain
        better = total > merged[count : count + reach]
        merged[count : count + reach][better] = total[better]
        taken[count : count + reach][better] = count
    return merged, taken


def _nodes(merges: list[list[tuple[int, NDArray[np.int64]]]], size: int) -> tuple[int, ...]:
    chosen: list[int] = []
    pending = [(0, size)]
    while pending:
        node, count = pending.pop()
        chosen.append(node)
        for child, taken in reversed(merges[node]):
            share = int(taken[count])
            count -= share
            if share:
                pending.append((child, share))
    return tuple(sorted(chosen))
