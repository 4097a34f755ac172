"""A tree that stops growing where no wider pass can win: every decision is the one over the whole tree."""

import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from yggdrasil.calibration.measure import ShapeCycle
from yggdrasil.drafters.belief import SHAPES, Belief
from yggdrasil.drafters.counts import CountsDrafter
from yggdrasil.drafters.group import DrafterGroup
from yggdrasil.drafters.protocol import Budget
from yggdrasil.engine.aside import AsideTree
from yggdrasil.engine.free_trees import FreeTrees
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.engine.ranking import Ranking
from yggdrasil.native import is_native
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.stakes import NO_STAKES, Race
from yggdrasil.tree.step_costs import StepCosts
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree

WIDTHS = (1, 2, 4, 8, 16, 32)
CASES = 150
KINDS = [False, pytest.param(True, marks=pytest.mark.skipif(not is_native(), reason="no compiler here"))]


def some_costs(generator):
    steps = generator.uniform(0.0, 1.0, len(WIDTHS)) * generator.choice([0.05, 0.5, 2.0])
    times = 1.0 + np.cumsum(steps * (generator.random(len(WIDTHS)) < 0.9))  # now and then a wider pass costs nothing
    return StepCosts(0.0, {}, dict(zip(WIDTHS, times.tolist(), strict=True)), overhead_ms=0.05, plain_ms=1.0)


def some_counts(generator, native):
    weights = {name: generator.normal(scale=0.7, size=shape) for name, shape in SHAPES.items()}
    counts = DrafterGroup([CountsDrafter(Belief(**weights), native=native)])
    counts.begin(generator.integers(0, generator.integers(2, 9), 60).tolist())
    return counts


def both(counts, stakes, depth):
    """What is expected, and the tree: with stakes, and in full."""
    grown = []
    for each in (stakes, NO_STAKES):
        tree = TokenTree.on_host(WIDTHS[-1])
        aside = AsideTree(counts, tree, WIDTHS, shares_tree=True)
        grown.append((aside.grow(depth, each), tree, aside))
    return grown


@pytest.mark.parametrize("native", KINDS)
@pytest.mark.parametrize("objective", ["latency", "aal"])
def test_what_is_left_out_changes_no_decision(native, objective):
    generator, left_out = np.random.default_rng(3), 0
    for _ in range(CASES):
        trees = FreeTrees([some_costs(generator)], objective)
        counts, depth = some_counts(generator, native), int(generator.integers(1, 12))
        for _ in range(generator.integers(0, 4)):  # promises are kept more or less
            trees.settle(int(generator.integers(1, 9)), 0.0)
            trees.best(np.sort(generator.uniform(1, 6, len(WIDTHS))).tolist(), depth, 0, 1.0)
        (few, small, aside), (all_, whole, full) = both(counts, trees.stakes(0), depth)
        assert (few[-1] > 1.0) == (all_[-1] > 1.0)
        decided = trees.best(all_, depth, 0, 1.0)
        estimate = trees._estimate
        assert trees.best(few, depth, 0, 1.0) == decided
        assert trees._estimate == estimate
        width, size = decided.shape.verify_width, small.size
        assert aside.use(width) == full.use(width)
        assert size == whole.size or size >= width
        assert torch.equal(small.tokens[:size], whole.tokens[:size])
        assert torch.equal(small.scores[:size], whole.scores[:size])
        left_out += whole.size - size
    assert (left_out > 2 * CASES) == (objective == "latency")  # tokens alone are more with every node


@pytest.mark.skipif(not is_native(), reason="no compiler here")
def test_native_trees_end_where_portable_ones_do():
    sizes = []
    for native in (True, False):
        generator, own = np.random.default_rng(5), []
        for _ in range(CASES):
            trees, counts = FreeTrees([some_costs(generator)], "latency"), some_counts(generator, native)
            own.append(both(counts, trees.stakes(0), 8)[0][1].size)
        sizes.append(own)
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) > 5


def somebody_elses_tree(root, seed):
    """Some nodes below ``root``, one of which is out of the question, and what else was said there."""
    generator = np.random.default_rng(seed)
    tree = TokenTree.on_host(WIDTHS[-1], 4)
    tree.plant(root)
    for _ in range(generator.integers(1, 7)):
        parent, token = int(generator.integers(tree.size)), 20 + tree.size
        tree.attach(parent, token, math.log(generator.uniform(0.05, 0.95)))
    if generator.random() < 0.3 and tree.size > 2:
        tree.scores[tree.size - 2] = NO_SCORE
    tree.pool_scores.fill_(NO_SCORE)
    for place in generator.integers(0, 4 * tree.size, 3):
        tree.pool_tokens[place] = int(50 + place)
        tree.pool_scores[place] = tree.scores[place // 4] + math.log(generator.uniform(0.02, 0.3))
    return tree


def filled(generator, native, policy, shape):
    """The same tree filled with the policy's stakes, and in full; each with what its scores promise, and its order."""
    counts, seed, found = some_counts(generator, native), int(generator.integers(1 << 30)), []
    for stakes in (policy.stakes_beside(shape, 0), NO_STAKES):
        tree = somebody_elses_tree(counts._last, seed)
        counts.propose(tree, Budget(9, bound=stakes, from_root=False))
        ranking = Ranking(tree, WIDTHS)
        found.append((tree, ranking.rank(), ranking.order.tolist()))
    return found


@pytest.mark.parametrize("native", KINDS)
@pytest.mark.parametrize("objective", ["latency", "aal"])
def test_what_is_left_out_of_a_drafted_tree_changes_no_decision(native, objective):
    generator, left_out = np.random.default_rng(7), 0
    for _ in range(CASES):
        costs = replace(some_costs(generator), head_ms=generator.uniform(0.1, 1.0), draft_ms={2: 0.1})
        policy = ObjectivePolicy({0: costs}, {}, np.empty(0, dtype=np.float32), None, objective)
        for _ in range(generator.integers(0, 4)):
            policy.promises.observe(generator.uniform(0.0, 4.0), generator.uniform(0.0, 4.0))
        shape = TreeShape(2, int(generator.integers(1, 6)), int(generator.choice(WIDTHS)))
        (small, few, order), (whole, all_, every) = filled(generator, native, policy, shape)
        decided = policy.prune(shape, policy.promises.honest(all_), 0)
        assert policy.prune(shape, policy.promises.honest(few), 0) == decided
        best = decided.shape.verify_width
        assert small.size == whole.size or small.size >= best
        assert order[:best] == every[:best]
        for kept, known in zip(small.tensors()[:3], whole.tensors()[:3], strict=True):
            assert torch.equal(kept[: small.size], known[: small.size])
        left_out += whole.size - small.size
    assert (left_out > 2 * CASES) == (objective == "latency")


def test_stakes_follow_what_drafted_trees_keep():
    costs = StepCosts(0.3, {2: 0.1}, {1: 1.0, 4: 1.2, 8: 1.5}, overhead_ms=0.05, plain_ms=1.0)
    policy, shape = ObjectivePolicy({0: costs}, {}, np.empty(0, dtype=np.float32), None), TreeShape(2, 2, 4)
    before = policy.stakes_beside(shape, 0).tolist()
    policy.promises.observe(4.0, 1.0)
    after = policy.stakes_beside(shape, 0).tolist()
    assert (before[0], after[0]) == (1.0, policy.promises.kept)
    assert policy.promises.kept < 1.0
    assert before[1:] == after[1:]
    assert after[1::2] == [4, 8]


@pytest.mark.skipif(not is_native(), reason="no compiler here")
def test_native_trees_are_filled_as_far_as_portable_ones():
    sizes = []
    for native in (True, False):
        generator, own = np.random.default_rng(11), []
        for _ in range(CASES):
            costs = replace(some_costs(generator), head_ms=0.3, draft_ms={2: 0.1})
            policy = ObjectivePolicy({0: costs}, {}, np.empty(0, dtype=np.float32), None)
            own.append(filled(generator, native, policy, TreeShape(2, 2, 4))[0][0].size)
        sizes.append(own)
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) > 5


def test_a_measured_tree_is_filled_as_far_as_it_is_verified():
    generator = np.random.default_rng(13)
    cycle = ShapeCycle([TreeShape(0, 1, 8), TreeShape(2, 2, 8)], seed=0)
    for _ in range(40):
        (small, _, order), (_, _, every) = filled(generator, False, cycle, TreeShape(2, 2, 8))
        assert order[:8] == every[:8]
        assert small.size < 8 + 7, "beside the best, there are those that were drafted"


@pytest.mark.parametrize(("behind", "is_over"), [(5e-7, False), (2e-6, True)])
def test_what_rounding_may_have_decided_is_not_over(behind, is_over):
    race = Race(array("d", [1.0, 2, 1.0, 4, 0.75 * (1.0 - behind)]))
    race.add(0.0)
    race.add(math.log(0.5))  # two nodes promise 1.5; four would promise 2 at most
    assert race.is_over(math.log(0.25)) == is_over
