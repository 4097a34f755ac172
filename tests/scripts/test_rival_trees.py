"""The rules of rival trees, held against their slow twins and their papers' statements."""

from itertools import product

import numpy as np
import pytest
from rivals.eagle2 import Eagle2
from rivals.k_ary import expansion, k_ary
from rivals.merged import MergedSequences
from rivals.opt_tree import OptTree
from rivals.protocol import Pool, StaticTree
from rivals.sequence import sequence

K = 4


def pool_of(scores, edges=None):
    flat = np.asarray(scores, dtype=np.float32)
    return Pool(flat, flat if edges is None else np.asarray(edges, dtype=np.float32), K)


def test_the_best_of_a_pool():
    pool = pool_of([-3, -1, -np.inf, -1, -0.5, -4, -np.inf, -np.inf])

    assert pool.best(3).tolist() == [4, 1, 3]  # ties to the earlier entry
    assert pool.best(9, range(1, 2)).tolist() == [4, 5]  # what is taken or absent is never chosen
    assert pool.best(2, range(0, 1)).tolist() == [1, 3]


def test_static_trees_are_numbered_level_by_level():
    tree = StaticTree.from_paths([(0,), (1,), (0, 0), (1, 2), (0, 0, 3)])

    assert tree.parents == (0, 0, 1, 2, 3)
    assert tree.ranks == (0, 1, 0, 2, 3)
    assert tree.depths == (0, 1, 1, 2, 2, 3)
    with pytest.raises(ValueError, match=r"the parent of \(1, 0\) is missing"):
        StaticTree.from_paths([(0,), (1, 0)])
    with pytest.raises(ValueError, match="twice"):
        StaticTree.from_paths([(0,), (0,)])


def test_a_sequence_takes_first_candidates():
    growth = sequence(3)

    assert [growth.level(pool_of([]), range(0), depth).tolist() for depth in (1, 2, 3, 4)] == [[0], [K], [2 * K], []]


@pytest.mark.parametrize(
    ("most", "depth", "num_nodes"),
    [(7, 9, 6), (15, 9, 14), (31, 9, 30), (63, 9, 62), (63, 2, 6), (1, 9, 1)],
)
def test_binary_trees_use_the_whole_budget(most, depth, num_nodes):
    assert k_ary(2, most, depth).tree.num_nodes - 1 == num_nodes


def test_specinfers_expansion():
    tree = expansion((1, 1, 3, 1)).tree

    assert np.bincount(tree.depths).tolist() == [1, 1, 1, 3, 3]
    assert tree.ranks == (0, 0, 0, 1, 2, 0, 0, 0)
    assert len(set(zip(tree.parents, tree.ranks, strict=True))) == tree.num_nodes - 1


def test_merged_sequences_share_what_is_alike():
    """A sure drafter's sequences are one; an even drafter's spread out, each below its own beginning."""
    sure = np.tile([-1e-3, -9, -9, -9], 3)
    growth = MergedSequences(5, 2)
    assert growth.level(pool_of(sure, sure), range(1), 1).tolist() == [0]

    even = np.full(12, np.log(1 / 4))
    growth = MergedSequences(40, 2, seed=1)
    first = growth.level(pool_of(even, even), range(1), 1)
    assert first.tolist() == [0, 1, 2, 3]
    second = growth.level(pool_of(np.full(80, -1.0), np.full(80, np.log(1 / 4))), range(1, 5), 2)
    assert len(second) == len(set(second.tolist())) > 10
    assert set(second // K) == {1, 2, 3, 4}
    assert len(growth.level(pool_of(even), range(5, 9), 3)) == 0


def test_draws_follow_the_drafter():
    probabilities = np.array([0.6, 0.25, 0.1, 0.05])
    growth, counts = MergedSequences(1, 1, seed=0), np.zeros(K)
    for _ in range(2000):
        counts[growth.level(pool_of(np.log(probabilities), np.log(probabilities)), range(1), 1)] += 1

    assert np.abs(counts / 2000 - probabilities).max() < 0.04


def test_opt_tree_stops_where_a_level_adds_too_little():
    """Level 1 gives 0.9 + 0.1; level 2 adds 0.3 to the best three nodes: more than 0.25, less than 0.35.

    What the root still offers (0.5) is left alone: a level hangs below the level before.
    """
    first = pool_of(np.log([0.9, 0.1, 0.01, 0.001]))
    offered = [-np.inf, -np.inf, np.log(0.5), -np.inf]
    second = pool_of(np.concatenate([offered, np.log([0.2, 0.19, 0.1, 0.01, 0.05, 0.04, 0.01, 0.01])]))
    for min_gain, expected in [(0.25, [K, K + 1]), (0.35, [])]:
        growth = OptTree(3, 2, min_gain)
        assert growth.level(first, range(1), 1).tolist() == [0, 1]
        assert growth.level(second, range(1, 3), 2).tolist() == expected


def test_eagle2_expands_the_last_level_and_reranks_all():
    scores = [-np.inf, -np.inf, -0.5, -3, *(-2.0, -2.5, -4, -9), *(-1.0, -8, -9, -9)]
    growth = Eagle2(budget=3, top_k=2)

    assert growth.level(pool_of(scores), range(1, 3), 2).tolist() == [8, 4]  # not 2: it hangs below the root
    assert growth.last(pool_of(scores), range(1, 3), 2).tolist() == [2, 8, 4]


def test_every_rule_names_itself():
    rules = [sequence(3), k_ary(2, 7, 9), MergedSequences(2, 3), OptTree(7, 4, 0.0), Eagle2(7, 4)]
    assert len({rule.name for rule in rules}) == len(rules)
    assert [rule.reads_pool for rule in rules] == [False, False, True, True, True]


def test_levels_of_a_static_tree_hang_together():
    growth = expansion((2, 3))
    pool = pool_of([])
    first, second = growth.level(pool, range(1), 1), growth.last(pool, range(1, 3), 2)

    assert first.tolist() == [0, 1]
    assert second.tolist() == [node * K + rank for node, rank in product((1, 2), range(3))]
