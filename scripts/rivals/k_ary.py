"""k-ary trees: SpecInfer's expansion-based tree (Miao et al. 2024, section 3), the same at every position."""

from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul

from rivals.protocol import StaticGrowth, StaticTree


def expansion(widths: Sequence[int]) -> StaticGrowth:
    """Return a tree that expands each node of level i to its ``widths[i]`` best tokens (SpecInfer uses 1-1-3-1-...)."""
    paths = [path for depth in range(1, len(widths) + 1) for path in product(*map(range, widths[:depth]))]
    return StaticGrowth(f"expansion {'-'.join(map(str, widths))}", StaticTree.from_paths(paths))


def k_ary(k: int, max_nodes: int, max_depth: int) -> StaticGrowth:
    """Return the deepest full k-ary tree within ``max_nodes`` (root excluded) and ``max_depth``, one level at least."""
    sizes = accumulate(accumulate([k] * max_depth, mul))  # nodes of the first 1, 2, ... levels
    depth = max(1, sum(size <= max_nodes for size in sizes))
    return expansion([min(k, max_nodes)] * depth)
