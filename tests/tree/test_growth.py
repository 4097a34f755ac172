"""Equal-Growth Tree growth against lists and a search over all candidates."""

import math
import random
from itertools import accumulate

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from integrity import check_tree

from yggdrasil.tree.token_tree import (
    MIN_LOG_PROBABILITY,
    TokenTree,
    attach_best,
    calibrated,
    offer_candidates,
    plant_root,
    rank_nodes,
)

CPU = torch.device("cpu")
VOCAB_SIZE = 11


class TableDrafter:
    """A drafter whose logits depend on the last two tokens of a path only."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, generator=generator) * 2

    def logits(self, path):
        return self._table[path[-2] if len(path) > 1 else 0, path[-1]]


def curved_knots():
    """A calibration that is neither the identity nor straight."""
    return -0.05 - torch.linspace(3.0, 0.0, 30) ** 1.5


def grow(drafter, root, width, steps, candidates, num_nodes, knots):
    """Grow as a draft model's compiled steps do; returns the tree and the nodes of each step."""
    tree = TokenTree.allocate(num_nodes, candidates, CPU)
    plant_root(tree, torch.tensor([root]))
    offer_candidates(tree, torch.tensor([0]), drafter.logits([root])[None], knots)
    attached = []
    for step in range(steps):
        nodes = attach_best(tree, torch.tensor([1 + step * width]), width)
        logits = [drafter.logits(tree.tokens[tree.path(int(node))].tolist()) for node in nodes]
        offer_candidates(tree, nodes, torch.stack(logits), knots)
        attached.append(nodes.tolist())
    return tree, attached


def slow_calibrated(log_probability, knots):
    """Linear interpolation between knots, by walking along them."""
    points = [MIN_LOG_PROBABILITY * (1 - i / (len(knots) - 1)) for i in range(len(knots))]
    x = min(max(log_probability, MIN_LOG_PROBABILITY), 0.0)
    for i in range(len(knots) - 1):
        if x <= points[i + 1] or i == len(knots) - 2:
            share = (x - points[i]) / (points[i + 1] - points[i])
            return knots[i] + share * (knots[i + 1] - knots[i])
    raise AssertionError("unreachable")


def slow_grow(drafter, root, width, steps, candidates, knots):
    """Nodes as (path, score, edge): each step takes the ``width`` best of all candidates, one argmax at a time."""
    nodes = [((root,), 0.0, 0.0)]
    pool = []

    def offer(path, score):
        logits = drafter.logits(list(path)).tolist()
        total = math.log(sum(math.exp(logit) for logit in logits))
        best = sorted(range(VOCAB_SIZE), key=lambda token: -logits[token])[:candidates]
        pool.extend(
            ((*path, token), score + slow_calibrated(logits[token] - total, knots), logits[token] - total)
            for token in best
        )

    offer((root,), 0.0)
    for _ in range(steps):
        new = []
        for _ in range(width):
            best = max(range(len(pool)), key=lambda i: pool[i][1])
            new.append(pool.pop(best))
        nodes += new
        for path, score, _ in new:
            offer(path, score)
    return nodes


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_growth_takes_the_best_of_all_candidates(seed, width):
    rng = random.Random(seed)
    steps, candidates, spare = rng.randint(1, 5), width + rng.randint(0, 3), rng.randint(0, 4)
    knots = rng.choice([curved_knots(), torch.linspace(-12.0, -1e-4, 128)])
    drafter = TableDrafter(seed)
    tree, attached = grow(drafter, 3, width, steps, candidates, 1 + steps * width + spare, knots)
    expected = slow_grow(drafter, 3, width, steps, candidates, knots.tolist())

    check_tree(tree)
    assert tree.size == 1 + steps * width
    assert attached == [list(range(1 + step * width, 1 + (step + 1) * width)) for step in range(steps)]
    for node, (path, score, edge) in enumerate(expected):
        assert tuple(tree.tokens[tree.path(node)].tolist()) == path
        assert tree.scores[node].item() == pytest.approx(score, abs=1e-4)
        assert tree.edges[node].item() == pytest.approx(edge, abs=1e-4)


def test_a_second_tree_starts_from_nothing():
    """Buffers that held another tree give the same tree as new ones."""
    knots, generator = curved_knots(), TableDrafter(5)
    fresh, _ = grow(generator, 4, 2, 3, 3, 7, knots)
    used, _ = grow(TableDrafter(6), 2, 3, 2, 3, 7, knots)
    plant_root(used, torch.tensor([4]))
    offer_candidates(used, torch.tensor([0]), generator.logits([4])[None], knots)
    for step in range(3):
        nodes = attach_best(used, torch.tensor([1 + step * 2]), 2)
        logits = [generator.logits(used.tokens[used.path(int(node))].tolist()) for node in nodes]
        offer_candidates(used, nodes, torch.stack(logits), knots)

    for name in ("tokens", "parents", "depths", "scores", "edges", "ancestors", "pool_scores"):
        assert torch.equal(getattr(fresh, name), getattr(used, name)), name


def test_growth_writes_in_place():
    tree = TokenTree.allocate(7, 3, CPU)
    addresses = [buffer.data_ptr() for buffer in tree.tensors()]
    plant_root(tree, torch.tensor([1]))
    offer_candidates(tree, torch.tensor([0]), TableDrafter(0).logits([1])[None], curved_knots())
    attach_best(tree, torch.tensor([1]), 2)

    assert [buffer.data_ptr() for buffer in tree.tensors()] == addresses


@examples(60)
@given(st.floats(-30, 0), st.integers(2, 40))
def test_calibration_is_linear_between_knots(log_probability, num_knots):
    knots = -0.01 - torch.linspace(2.5, 0.0, num_knots) ** 2

    expected = slow_calibrated(log_probability, knots.tolist())
    assert calibrated(torch.tensor([log_probability]), knots).item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_every_prefix_of_the_ranking_is_the_best_subtree(seed):
    """It is connected, and no set of as many nodes, connected or not, has a higher value."""
    rng = random.Random(seed)
    width, steps, spare = rng.randint(1, 4), rng.randint(1, 4), rng.randint(0, 3)
    tree, _ = grow(TableDrafter(seed), 3, width, steps, 6, 1 + steps * width + spare, curved_knots())
    order, expected_tokens = rank_nodes(tree)
    size = tree.size
    values = tree.scores[:size].exp().tolist()
    best = list(accumulate(sorted(values, reverse=True)))

    assert sorted(order.tolist()) == list(range(tree.num_nodes))
    for count in range(1, size + 1):
        chosen = set(order[:count].tolist())
        assert all(int(tree.parents[node]) in chosen for node in chosen)
        assert expected_tokens[count - 1].item() == pytest.approx(best[count - 1], rel=1e-5)
        assert expected_tokens[count - 1].item() == pytest.approx(sum(values[node] for node in chosen), rel=1e-5)
    assert expected_tokens[size:].tolist() == pytest.approx([best[-1]] * spare, rel=1e-5)  # absent nodes add none
