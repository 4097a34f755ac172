"""Several drafters on one tree against the union of their trees."""

import pytest
import torch
from example_drafter import LastFollowerDrafter
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_target import decode, paths, plain_decode, wandering_target
from transformers import AutoModelForCausalLM, LlamaConfig

from yggdrasil.drafters import DraftModel, JointDrafter, NGramDrafter
from yggdrasil.drafters.draft_model import identity_knots
from yggdrasil.models.loading import prepare_model
from yggdrasil.models.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree

CPU = torch.device("cpu")
BRANCHES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


class ScriptedDrafter:
    """Always guesses the same branches; knows nothing of other drafters."""

    def __init__(self, branches, hidden_layers=()):
        self.name = "script"
        self.hidden_layers = hidden_layers
        self.extended = []
        self._branches = branches

    def begin(self, tokens):
        self._last = tokens[-1]

    def extend(self, tokens, hidden):
        self._last = tokens[-1]
        self.extended.append(hidden)

    def head(self, tree):
        tree.plant(self._last)

    def grow(self, tree, width, depth):
        nodes = {(): 0}
        for branch in self._branches:
            for end in range(1, min(len(branch), depth) + 1):
                if tuple(branch[:end]) not in nodes and tree.size < tree.num_nodes:
                    parent = nodes[tuple(branch[: end - 1])]
                    nodes[tuple(branch[:end])] = tree.attach(parent, branch[end - 1], -0.25 * end)


def slow_union(branch_lists, depth, num_nodes):
    """Paths of every branch, first come first served; each drafter alone fits as many nodes as the tree."""
    union = []
    for branches in branch_lists:
        own = []
        for branch in branches:
            for end in range(1, min(len(branch), depth) + 1):
                if tuple(branch[:end]) not in own and len(own) < num_nodes - 1:
                    own.append(tuple(branch[:end]))
        union += [path for path in own if path not in union]
    return union[: num_nodes - 1]


def grown(drafter, num_nodes=64, width=2, depth=4, candidates=1):
    tree = TokenTree.allocate(num_nodes, candidates, CPU)
    addresses = [buffer.data_ptr() for buffer in tree.tensors()]
    drafter.head(tree)
    drafter.grow(tree, width, depth)
    tree.check_integrity()
    assert [buffer.data_ptr() for buffer in tree.tensors()] == addresses
    return tree


@settings(max_examples=300, deadline=None)
@given(st.lists(BRANCHES, min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 24))
def test_tree_is_the_union_while_there_is_room(branch_lists, depth, num_nodes):
    drafter = JointDrafter([ScriptedDrafter(branches) for branches in branch_lists])
    drafter.begin([7])

    assert paths(grown(drafter, num_nodes, depth=depth)) == slow_union(branch_lists, depth, num_nodes)


def test_estimates_of_shared_nodes_are_the_first_drafters():
    drafter = JointDrafter([ScriptedDrafter([[1, 2]]), ScriptedDrafter([[3, 1], [1, 2, 3]])])
    drafter.begin([7])
    tree = grown(drafter)

    assert paths(tree) == [(1,), (1, 2), (3,), (3, 1), (1, 2, 3)]
    assert tree.scores[1:6].tolist() == pytest.approx([-0.25, -0.75, -0.25, -0.75, -1.5])


def test_every_drafter_sees_its_own_layers():
    first, second = ScriptedDrafter([], hidden_layers=(4, 1)), ScriptedDrafter([], hidden_layers=(-1, 4))
    joint = JointDrafter([first, second])
    assert joint.hidden_layers == (-1, 1, 4)
    states = {layer: torch.full((1, 2), float(layer)) for layer in joint.hidden_layers}
    joint.begin([7])
    joint.extend([8], states)

    assert [set(seen) for seen in (*first.extended, *second.extended)] == [{4, 1}, {-1, 4}]


def test_faults_are_named():
    with pytest.raises(ValueError, match="at least one"):
        JointDrafter([])
    with pytest.raises(ValueError, match="1 later drafters need as many side trees, got 0"):
        JointDrafter([NGramDrafter(), NGramDrafter()], side_trees=[])


def test_output_equals_plain_decoding_and_two_drafters_beat_one():
    def iterations(drafter):
        tree = TokenTree.allocate(16, 1, CPU)
        decoded = decode(drafter, wandering_target, [1, 4], 150, tree)
        assert decoded.tokens == plain_decode(wandering_target, [1, 4], 150)
        return decoded.num_iterations

    joint = iterations(JointDrafter([LastFollowerDrafter(), NGramDrafter()]))

    assert joint <= min(iterations(LastFollowerDrafter()), iterations(NGramDrafter()))


# ==== with draft models, whose steps hold the addresses of their tree ====


def tiny_drafter(tree, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    runner = ModelRunner(prepare_model(model, f"tiny {seed}", num_threads=1), 300, 13, "eager")
    return DraftModel(runner, tree, widths=[2], head_width=5, prefill_widths=[8], knots=identity_knots())


@torch.inference_mode()
def test_ngrams_join_behind_a_draft_model():
    alone_tree, joint_tree = (TokenTree.allocate(24, 4, CPU) for _ in range(2))
    alone, joint = tiny_drafter(alone_tree, 0), JointDrafter([tiny_drafter(joint_tree, 0), NGramDrafter()])
    addresses = [buffer.data_ptr() for buffer in joint_tree.tensors()]
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    for drafter, tree in ((alone, alone_tree), (joint, joint_tree)):
        drafter.begin(text)
        for certain in ([4], [5, 6], [7, 1, 2, 3, 4, 5, 6, 7, 1]):
            drafter.extend(certain, {})
            drafter.head(tree)
            drafter.grow(tree, 2, 4)
            tree.check_integrity()

    size = alone_tree.size
    assert size == 9
    for name in ("tokens", "parents", "depths", "scores", "edges"):
        assert torch.equal(getattr(joint_tree, name)[:size], getattr(alone_tree, name)[:size]), name
    assert (2, 3, 4, 5) in paths(joint_tree)
    assert [buffer.data_ptr() for buffer in joint_tree.tensors()] == addresses


@torch.inference_mode()
def test_two_draft_models_join_through_a_side_tree():
    shared, side, *own = (TokenTree.allocate(24, 4, CPU) for _ in range(4))
    joint = JointDrafter([tiny_drafter(shared, 0), tiny_drafter(side, 1)], side_trees=[side])
    alone = [tiny_drafter(tree, seed) for seed, tree in enumerate(own)]
    joint.begin([1, 2, 3])
    joint.head(shared)
    joint.grow(shared, 2, 3)
    for drafter, tree in zip(alone, own, strict=True):
        drafter.begin([1, 2, 3])
        drafter.head(tree)
        drafter.grow(tree, 2, 3)

    shared.check_integrity()
    assert set(paths(shared)) == {*paths(own[0]), *paths(own[1])}
    assert paths(shared)[:6] == paths(own[0])


def test_a_joint_drafter_made_in_inference_mode_serves_outside_it():
    drafter = JointDrafter([LastFollowerDrafter(), NGramDrafter()])
    tree = TokenTree.allocate(8, 1, CPU)
    drafter.begin([1, 2, 1])
    with torch.inference_mode():
        drafter.head(tree)
        drafter.grow(tree, 1, 2)
    drafter.head(tree)
    drafter.grow(tree, 1, 2)

    tree.check_integrity()
