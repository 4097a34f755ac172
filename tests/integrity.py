"""Invariants of trees and of recorded trees."""

import numpy as np
import torch

from yggdrasil.profiling.traces import ROOT, TraceSet
from yggdrasil.profiling.traces import _gather_parent as gather_parent
from yggdrasil.tree.token_tree import TokenTree


def check_tree(tree: TokenTree) -> None:
    """Assert all invariants of a tree."""
    size = tree.size
    exists = torch.isfinite(tree.scores)
    assert bool(exists[:size].all()), "nodes are not numbered without gaps"
    assert tree.scores[0] == 0, "the root must have score 0"
    assert tree.depths[0] == 0, "the root must have depth 0"
    seen: set[tuple[int, int]] = set()
    for node in range(1, size):
        parent, token = int(tree.parents[node]), int(tree.tokens[node])
        assert parent < node, f"{parent = } does not come before {node = }"
        assert tree.depths[node] == tree.depths[parent] + 1, f"depth of {node = }"
        assert tree.scores[node] < tree.scores[parent], f"score of {node = } is not below its parent's"
        expected = tree.ancestors[parent].clone()
        expected[node] = True
        assert torch.equal(tree.ancestors[node], expected), f"ancestors of {node = }"
        assert (parent, token) not in seen, f"{node = } repeats token {token} below {parent = }"
        seen.add((parent, token))


def check_traces(traces: TraceSet) -> None:
    """Assert that every recorded tree was grown step by step, with scores that fall along every path."""
    for width in traces.widths:
        assert not _tree_faults(traces, width), f"width {width}"


def _tree_faults(traces: TraceSet, width: int) -> list[str]:
    parent, depth, hit = traces.parent[width], traces.depth[width], traces.hit[width]
    used = np.isfinite(traces.scores[width])
    step_start = np.arange(parent.shape[1]) // width * width
    parent_score = gather_parent(traces.scores[width], parent, root_value=0.0)
    checks = {
        "a parent was attached in the same or a later step": (parent >= step_start) | (parent < ROOT),
        "a depth is not its parent's plus one": used & (depth != gather_parent(depth, parent, root_value=0) + 1),
        "a hit hangs below a miss": hit & ~gather_parent(hit, parent, root_value=True),
        "a score does not fall along its path": used & (traces.scores[width] >= parent_score),
        "an empty slot is a hit": hit & ~used,
    }
    return [f"{what} ({int(bad.sum())} nodes)" for what, bad in checks.items() if bad.any()]
