"""Sequoia's dynamic programme against brute force, against a greedy twin, and against the paper's statement on size."""

import heapq
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from rivals.sequoia import SequoiaTables, choose_size, sequoia

from yggdrasil.policy.costs import StepCosts

ACCEPTANCE = (0.6, 0.2, 0.1)
LONG = tuple(0.55 * 0.4**rank for rank in range(8))


def value_of(tree, acceptance):
    """Expected tokens a pass, node by node."""
    values = [1.0]
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        values.append(values[parent] * acceptance[rank])
    return sum(values)


@cache
def all_trees(num_nodes, depth, ranks):
    """Every tree (as a sorted tuple of paths) of ``num_nodes`` non-root nodes."""
    if num_nodes == 0:
        return {()}
    found = set()
    for smaller in all_trees(num_nodes - 1, depth, ranks):
        for parent in [(), *smaller]:
            if len(parent) < depth:
                for rank in range(ranks):
                    child = (*parent, rank)
                    if child not in smaller:
                        found.add(tuple(sorted((*smaller, child))))
    return found


def brute_force(acceptance, num_nodes, depth):
    trees = all_trees(num_nodes - 1, depth, len(acceptance))
    return max((1 + sum(np.prod([acceptance[r] for r in path]) for path in tree) for tree in trees), default=-np.inf)


def greedy_twin(acceptance, num_nodes, depth):
    """With falling acceptance the best tree is the best nodes of the endless one, taken one by one."""
    heap, total, taken = [(-1.0, ())], 0.0, 0
    while heap and taken < num_nodes:
        value, path = heapq.heappop(heap)
        total, taken = total - value, taken + 1
        if len(path) < depth:
            for rank, p in enumerate(acceptance):
                heapq.heappush(heap, (value * p, (*path, rank)))
    return total


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("acceptance", [ACCEPTANCE, (0.3, 0.5), (0.9,), (0.4, 0.4, 0.0)])
def test_the_programme_equals_brute_force(acceptance, depth):
    """Also where a later rank is the better one."""
    tables = SequoiaTables(acceptance, 6, depth)
    for num_nodes in range(1, 7):
        expected = brute_force(acceptance, num_nodes, depth)
        if 0.0 in acceptance and np.isfinite(expected) and not np.isfinite(tables.value(num_nodes, depth)):
            continue  # a rank that is never right is never used, not even to fill the size
        assert tables.value(num_nodes, depth) == pytest.approx(expected)


@pytest.mark.parametrize(("num_nodes", "depth"), [(8, 3), (16, 4), (33, 8), (64, 8)])
def test_trees_are_worth_what_the_table_says(num_nodes, depth):
    tables = SequoiaTables(LONG, 64, 8)
    tree = tables.tree(num_nodes, depth)

    assert tree.num_nodes == num_nodes
    assert max(tree.depths) <= depth
    assert value_of(tree, LONG) == pytest.approx(tables.value(num_nodes, depth))
    assert tables.value(num_nodes, depth) == pytest.approx(greedy_twin(LONG, num_nodes, depth))


def test_accepted_length_grows_like_the_logarithm_of_the_size():
    """The paper's theorem 3.6: with acceptance that falls off like a power, tokens a pass grow about as log n."""
    acceptance = [0.5 * rank**-1.5 for rank in range(1, 17)]
    sizes = np.array([2, 4, 8, 16, 32, 64, 128])
    tables = SequoiaTables(acceptance, 128, 20)
    tokens = np.array([tables.value(int(size), 20) for size in sizes])
    slope, intercept = np.polyfit(np.log(sizes), tokens, 1)

    assert (np.diff(tokens) > 0.1).all()
    assert np.abs(slope * np.log(sizes) + intercept - tokens).max() < 0.12 * tokens.mean()
    chain = [sum(acceptance[0] ** i for i in range(size)) for size in sizes.tolist()]
    assert chain[-1] - chain[-2] < 1e-3  # a sequence has long stopped growing


def test_costs_choose_the_size():
    tables = SequoiaTables(LONG, 32, 8)
    verify = {1: 10.0, 8: 10.5, 16: 11.0, 32: 60.0}
    costs = StepCosts(0.5, {8: 0.2}, verify, 0.1, 10.1)
    choice = choose_size(tables, costs, (4, 8))
    times = {}
    for size, depth in [(size, depth) for size in (8, 16, 32) for depth in range(1, 9)]:
        if np.isfinite(tables.value(size, depth)):
            levels = np.bincount(tables.tree(size, depth).depths)[1:-1]
            drafting = 0.5 + 0.2 * sum(-(-level // 8) for level in levels.tolist())
            times[size, depth] = (drafting + verify[size] + 0.1) / tables.value(size, depth)

    assert (choice.num_nodes, choice.depth) == min(times, key=times.get)
    assert choice.ms_per_token == pytest.approx(min(times.values()))
    assert choice.num_nodes < 32
    dear = StepCosts(0.5, {8: 50.0}, verify, 0.1, 10.1)
    assert choose_size(tables, dear, (4, 8)).depth < choice.depth


def test_faults_are_named():
    with pytest.raises(ValueError, match="probabilities"):
        SequoiaTables((1.2,), 4, 2)
    with pytest.raises(ValueError, match="root"):
        SequoiaTables((0.5,), 0, 2)
    with pytest.raises(ValueError, match="5 nodes do not fit into depth 2 with 1 ranks"):
        SequoiaTables((0.5,), 5, 2).tree(5, 2)
    assert sequoia(SequoiaTables((0.5,), 5, 2), 5).tree.num_nodes == 3


def test_pairs_of_ranks_are_never_repeated():
    tree = SequoiaTables(LONG, 64, 8).tree(64, 8)
    nodes = list(zip(tree.parents, tree.ranks, strict=True))

    assert all(a != b for a, b in combinations(nodes, 2))
