"""A tree that stops growing where no wider pass can win: every decision is the one over the fully grown tree."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from yggdrasil.drafters.protocol import Budget, DrafterGroup
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.drafters.statistics.scorer import SHAPES, NGramScorer
from yggdrasil.engine.iteration import ShadowTree
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.policy.objective import UNBOUNDED, Decision, ModelFree
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.token_tree import NO_SCORE, Ranking, TokenTree

WIDTHS = (1, 2, 4, 8, 16, 32)
CASES = 150


def some_costs(generator):
    steps = generator.uniform(0.0, 1.0, len(WIDTHS)) * generator.choice([0.05, 0.5, 2.0])
    times = 1.0 + np.cumsum(steps * (generator.random(len(WIDTHS)) < 0.9))  # now and then a wider pass costs nothing
    return StepCosts(0.0, {}, dict(zip(WIDTHS, times.tolist(), strict=True)), overhead_ms=0.05, plain_ms=1.0)


def some_counts(generator):
    weights = {name: generator.normal(scale=0.7, size=shape) for name, shape in SHAPES.items()}
    counts = DrafterGroup([StatisticsDrafter(NGramScorer(**weights))])
    counts.begin(generator.integers(0, generator.integers(2, 9), 60).tolist())
    return counts


def both(counts, bound, depth):
    """What is expected, and the tree: with bound, and in full."""
    grown = []
    for each in (bound, UNBOUNDED):
        tree = TokenTree.on_host(WIDTHS[-1])
        shadow = ShadowTree(counts, tree, WIDTHS, shares_tree=True)
        grown.append((shadow.grow(depth, each), tree, shadow))
    return grown


def model_free_policy(costs, objective="latency"):
    return ObjectivePolicy({0: costs}, {}, np.empty(0, dtype=np.float32), None, objective)


@pytest.mark.parametrize("objective", ["latency", "aal"])
def test_early_stopping_decides_as_full_growth(objective):
    generator, left_out = np.random.default_rng(3), 0
    for _ in range(CASES):
        policy = model_free_policy(some_costs(generator), objective)
        counts, depth = some_counts(generator), int(generator.integers(1, 12))
        for _ in range(generator.integers(0, 4)):  # more or less is accepted than was estimated
            decision = Decision(TreeShape(0, 8, 8), estimated=generator.uniform(1, 6), milliseconds=1.0)
            policy.observe(decision, int(generator.integers(1, 9)), 1.0)
        (few, small, shadow), (all_, whole, full) = both(counts, policy.bound(0), depth)
        assert (few[-1] > 1.0) == (all_[-1] > 1.0)
        decided = policy.best_model_free(ModelFree(all_, depth))
        assert policy.best_model_free(ModelFree(few, depth)) == decided
        size = small.size
        if decided is not None:
            width = decided.shape.verify_width
            assert shadow.use(width) == full.use(width)
            assert size == whole.size or size >= width
        assert torch.equal(small.tokens[:size], whole.tokens[:size])
        assert torch.equal(small.scores[:size], whole.scores[:size])
        left_out += whole.size - size
    assert (left_out > 2 * CASES) == (objective == "latency")  # tokens alone are more with every node


def drafted_tree(root, seed):
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


def filled(generator, policy, shape):
    """The same tree filled with the policy's bound, and in full; each with what its scores promise, and its order."""
    counts, seed, found = some_counts(generator), int(generator.integers(1 << 30)), []
    for bound in (policy.bound(0, shape), UNBOUNDED):
        tree = drafted_tree(counts._last, seed)
        counts.propose(tree, Budget(9, bound=bound, is_first=False))
        ranking = Ranking(tree, WIDTHS)
        found.append((tree, ranking.rank(), ranking.order.tolist()))
    return found


@pytest.mark.parametrize("objective", ["latency", "aal"])
def test_what_is_left_out_of_a_drafted_tree_changes_no_decision(objective):
    generator, left_out = np.random.default_rng(7), 0
    for _ in range(CASES):
        costs = replace(some_costs(generator), head_ms=generator.uniform(0.1, 1.0), draft_ms={2: 0.1})
        policy = model_free_policy(costs, objective)
        shape = TreeShape(2, int(generator.integers(1, 6)), int(generator.choice(WIDTHS)))
        (small, few, order), (whole, all_, every) = filled(generator, policy, shape)
        decided = policy.prune(Decision(shape), all_, 0)
        assert policy.prune(Decision(shape), few, 0) == decided
        best = decided.shape.verify_width
        assert small.size == whole.size or small.size >= best
        assert order[:best] == every[:best]
        for kept, known in zip(small.tensors()[:3], whole.tensors()[:3], strict=True):
            assert torch.equal(kept[: small.size], known[: small.size])
        left_out += whole.size - small.size
    assert (left_out > 2 * CASES) == (objective == "latency")


def test_the_bound_follows_what_model_free_drafts_had_accepted():
    """In place: C++ holds its address."""
    costs = StepCosts(0.0, {}, {1: 1.0, 4: 1.2, 8: 1.5}, overhead_ms=0.05, plain_ms=1.0)
    policy = model_free_policy(costs)
    bound, before = policy.bound(0), policy.bound(0).tolist()
    policy.observe(Decision(TreeShape(0, 4, 4), 5.0, 1.0, estimated=5.0), 1, 1.0)
    assert policy.bound(0) is bound
    assert bound[::3].tolist() == before[::3] == [4, 8]
    assert bound[1::3] == bound[1::3]
    assert bound[2] < before[2] == bound[1]


def test_a_measured_tree_is_filled_as_far_as_it_is_verified():
    generator = np.random.default_rng(13)
    shape = TreeShape(2, 2, 8)
    for _ in range(40):
        (small, _, order), (_, _, every) = filled(generator, FixedPolicy(shape), shape)
        assert order[:8] == every[:8]
        assert small.size < 8 + 7, "beside the best, there are those that were drafted"
