"""The token tree against lists of tuples."""

import math
import random

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from integrity import check_tree

from yggdrasil.tree.token_tree import CONSIDERED, TokenTree, num_considered, plant_root

CPU = torch.device("cpu")
GUESSES = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3), st.floats(-3, 0)), max_size=12)


def new_tree(num_nodes=16, root=9):
    tree = TokenTree.allocate(num_nodes, candidates=2, device=CPU)
    tree.plant(root)
    return tree


def random_tree(seed, size):
    """A tree and, as its twin, the root-to-node tokens of every node."""
    rng = random.Random(seed)
    tree, twin = new_tree(), [()]
    while tree.size < size:
        parent, token = rng.randrange(tree.size), rng.randrange(5)
        if (*twin[parent], token) not in twin:
            tree.attach(parent, token, rng.uniform(-2, 0))
            twin.append((*twin[parent], token))
    return tree, twin


@pytest.mark.parametrize("size", range(1, 17))
@pytest.mark.parametrize("seed", range(3))
def test_attached_nodes_are_where_they_should_be(seed, size):
    tree, twin = random_tree(seed, size)

    check_tree(tree)
    assert tree.size == size
    for node, tokens in enumerate(twin):
        path = tree.path(node)
        assert path[0] == 0
        assert path[-1] == node
        assert tuple(tree.tokens[path[1:]].tolist()) == tokens
        assert tree.depths[node] == len(tokens)
        assert twin[tree.parents[node]] == tokens[:-1]
        assert tree.scores[node] == pytest.approx(tree.edges[path].sum().item(), abs=2e-3)  # MIN_DESCENT a level


def test_attach_refuses_what_is_no_tree():
    tree = new_tree(num_nodes=3)
    tree.attach(0, 5, -1.0)

    with pytest.raises(ValueError, match="already has a child with token 5"):
        tree.attach(0, 5, -1.0)
    with pytest.raises(ValueError, match="parent 2 is not a node"):
        tree.attach(2, 5, -1.0)
    with pytest.raises(ValueError, match="parent -1 is not a node"):
        tree.attach(-1, 5, -1.0)
    with pytest.raises(ValueError, match="at most 0"):
        tree.attach(1, 5, 0.1)
    tree.attach(1, 5, 0.0)
    with pytest.raises(ValueError, match="the tree is full: 3 nodes"):
        tree.attach(0, 6, -1.0)
    check_tree(tree)


@pytest.mark.parametrize(("num_nodes", "candidates"), [(0, 1), (1, 0)])
def test_allocate_refuses_an_empty_tree(num_nodes, candidates):
    with pytest.raises(ValueError, match="a tree needs a root and a candidate"):
        TokenTree.allocate(num_nodes, candidates, CPU)


def slow_graft(tree, guesses):
    """``graft`` by single attachments."""
    places, added = [0], 0
    for parent, token, log_probability in guesses:
        below = places[parent]
        same = [n for n in range(1, tree.size) if tree.parents[n] == below and tree.tokens[n] == token]
        if not same and tree.size == tree.num_nodes:
            break
        added += not same
        places.append(same[0] if same else tree.attach(below, token, log_probability))
    return added


@examples(200)
@given(st.integers(0, 10_000), st.integers(1, 16), GUESSES)
def test_graft_equals_single_attachments(seed, size, drawn):
    guesses = [(pick % (i + 1), token, log_probability) for i, (pick, token, log_probability) in enumerate(drawn)]
    (tree, _), (twin, _) = random_tree(seed, size), random_tree(seed, size)
    for buffer in (tree.tokens, tree.parents, tree.depths, tree.edges, tree.ancestors):
        buffer[size:] = 1  # whatever earlier trees left
    addresses = [buffer.data_ptr() for buffer in tree.tensors()]

    assert tree.graft(*([guess[i] for guess in guesses] for i in range(3))) == slow_graft(twin, guesses)
    check_tree(tree)
    assert [buffer.data_ptr() for buffer in tree.tensors()] == addresses
    assert tree.size == twin.size
    for name in ("tokens", "parents", "depths", "edges", "ancestors"):
        assert torch.equal(getattr(tree, name)[: tree.size], getattr(twin, name)[: tree.size]), name
    torch.testing.assert_close(tree.scores, twin.scores)


def test_graft_refuses_what_is_no_tree_and_writes_nothing():
    tree = new_tree()
    before = [buffer.clone() for buffer in tree.tensors()]
    with pytest.raises(ValueError, match="node 2 has the parent 2"):
        tree.graft([0, 2], [1, 1], [-1.0, -1.0])
    with pytest.raises(ValueError, match="at most 0"):
        tree.graft([0, 1], [1, 1], [-1.0, 0.5])
    with pytest.raises(ValueError, match="at most 0"):
        tree.graft([0, 1], [1, 1], [-1.0, math.nan])

    assert all(torch.equal(now, then) for now, then in zip(tree.tensors(), before, strict=True))


def test_planting_forgets_everything_in_place():
    tree, _ = random_tree(seed=1, size=16)
    addresses = [buffer.data_ptr() for buffer in tree.tensors()]
    tree.plant(4)

    check_tree(tree)
    assert (tree.size, int(tree.tokens[0]), tree.path(0)) == (1, 4, [0])
    assert torch.isinf(tree.pool_scores).all()
    assert [buffer.data_ptr() for buffer in tree.tensors()] == addresses
    check_tree(tree)


def test_both_ways_to_plant_agree():
    (host, _), (device, _) = random_tree(2, 16), random_tree(2, 16)
    host.plant(4)
    plant_root(device, torch.tensor([4]))

    for ours, theirs in zip(host.tensors(), device.tensors(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("device", "is_sampled", "expected"),
    [("cpu", False, 4), ("cpu", True, 4 * CONSIDERED), ("meta", False, 4 * CONSIDERED)],
)
def test_a_target_that_samples_is_offered_more_candidates_and_any_on_a_gpu(device, is_sampled, expected):
    """A captured step of a GPU serves both kinds of target."""
    tree = TokenTree.allocate(8, 4, torch.device(device))
    if is_sampled:
        tree.draw_weights.fill_(1)

    assert num_considered(tree, 1000) == expected
    assert num_considered(tree, 20) == min(20, expected)
