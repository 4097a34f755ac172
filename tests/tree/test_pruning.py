"""The pruning dynamic programme against all connected subtrees."""

import random
from itertools import combinations

import pytest
from best_subtrees import best_subtrees


def random_parents(rng, size):
    return [0] + [rng.randrange(max(0, node - rng.choice([1, 3, size])), node) for node in range(1, size)]


def path_products(rng, parents):
    """Values that only fall along a path."""
    values = [1.0]
    for parent in parents[1:]:
        values.append(values[parent] * rng.uniform(0.05, 0.95))
    return values


def is_connected(parents, nodes):
    return all(node == 0 or parents[node] in nodes for node in nodes)


def slow_best_values(parents, values):
    """The greatest value of a connected subtree with the root, for each size, over all subsets."""
    best = []
    for size in range(1, len(parents) + 1):
        subsets = ({0, *rest} for rest in combinations(range(1, len(parents)), size - 1))
        best.append(max(sum(values[i] for i in nodes) for nodes in subsets if is_connected(parents, nodes)))
    return best


@pytest.mark.parametrize("kind", ["falling", "any sign", "integers"])
@pytest.mark.parametrize("seed", range(40))
def test_every_size_is_the_best_of_all_subtrees(seed, kind):
    rng = random.Random(seed)
    size = 14 if seed < 2 else rng.randint(1, 11)
    parents = random_parents(rng, size)
    if kind == "falling":
        values = path_products(rng, parents)
    elif kind == "any sign":
        values = [rng.gauss(0, 1) for _ in parents]
    else:  # full of ties
        values = [float(rng.randrange(-2, 3)) for _ in parents]
    best = slow_best_values(parents, values)
    max_size = rng.choice([size, rng.randint(1, size)])
    found = best_subtrees(parents, values, max_size)

    assert len(found) == max_size
    for count, (value, nodes) in enumerate(found, start=1):
        assert value == pytest.approx(best[count - 1], abs=1e-9)
        assert len(nodes) == count
        assert list(nodes) == sorted(set(nodes))
        assert is_connected(parents, set(nodes))
        assert 0 in nodes
        assert value == pytest.approx(sum(values[i] for i in nodes), abs=1e-9)


def test_the_best_small_tree_need_not_be_part_of_the_best_larger_one():
    # 0 - 1 - 2 with a treasure behind a worthless node, and a fair leaf 3.
    found = best_subtrees([0, 0, 1, 0], [1.0, 0.0, 5.0, 2.0], 4)

    assert [tree.nodes for tree in found] == [(0,), (0, 3), (0, 1, 2), (0, 1, 2, 3)]
    assert [tree.value for tree in found] == [1.0, 3.0, 6.0, 8.0]


def test_a_negative_value_is_taken_where_the_size_asks_for_it():
    assert best_subtrees([0, 0], [1.0, -4.0], 2)[1] == (-3.0, (0, 1))


@pytest.mark.parametrize(
    ("parents", "max_size", "message"),
    [
        ([0, 0], 0, r"max_size must be in 1\.\.2, got 0"),
        ([0, 0], 3, r"max_size must be in 1\.\.2, got 3"),
        ([0, 2, 0], 2, "a parent must come before its child"),
        ([0, 1], 2, "a parent must come before its child"),
        ([0, -1], 2, "a parent must come before its child"),
    ],
)
def test_what_is_no_tree_is_refused(parents, max_size, message):
    with pytest.raises(ValueError, match=message):
        best_subtrees(parents, [1.0] * len(parents), max_size)
