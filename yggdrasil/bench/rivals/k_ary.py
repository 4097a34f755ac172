"""k-ary expansion: SpecInfer's expansion-based tree (Miao et al. 2024, section 3), the same at every position."""

from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul

from yggdrasil.bench.rivals.protocol import StaticGrowth, StaticTree


def expansion(widths: Sequence[int]) -> StaticGrowth:
    """Expand every node of level i - 1 to its ``widths[i - 1]`` likeliest tokens; SpecInfer's own is 1-1-3-1-..."""
    paths = [path for depth in range(1, len(widths) + 1) for path in product(*map(range, widths[:depth]))]
    return StaticGrowth(f"expansion {'-'.join(map(str, widths))}", StaticTree.from_paths(paths))


def k_ary(k: int, max_nodes: int, max_depth: int) -> StaticGrowth:
    """The full k-ary tree of as many levels as ``max_nodes`` (root left out) and ``max_depth`` allow, at least one."""
    sizes = accumulate(accumulate([k] * max_depth, mul))  # nodes of the first 1, 2, ... levels
    depth = max(1, sum(size <= max_nodes for size in sizes))
    return expansion([min(k, max_nodes)] * depth)
