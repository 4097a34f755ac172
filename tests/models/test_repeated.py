"""Layers that repeat are found in whatever a step gives out of them."""

from itertools import pairwise

import pytest
import torch
from tiny_pair import SHAPES, make_pair

from yggdrasil.engine.build import assemble
from yggdrasil.engine.steps import PlainStep, VerifyStep
from yggdrasil.models.compiled import _exported
from yggdrasil.models.kernels import is_native
from yggdrasil.models.repeated import find_repetition
from yggdrasil.models.runner import ModelRunner
from yggdrasil.models.traced import HEAD_INPUT, RUNNERS_UP
from yggdrasil.models.units import drop_assertions

LAYERS = 6


@pytest.fixture(scope="module")
def target():
    return make_pair(num_hidden_layers=LAYERS, hidden_size=32).target


@pytest.mark.skipif(not is_native(), reason="no compiler here")
@pytest.mark.parametrize(
    ("read", "handed_out"),
    [
        ((), [5]),
        ((HEAD_INPUT, RUNNERS_UP), [5]),
        ((1, 3), [1, 3, 5]),
        ((0, 2, 4), [0, 2, 4, 5]),
    ],
    ids=str,
)
def test_states_that_a_drafter_reads_are_handed_out_and_take_no_layer_out_of_those_that_repeat(
    target, read, handed_out
):
    runner = ModelRunner(target, SHAPES.cache_capacity, target.vocab_size, "eager", read)
    tree = assemble(target, drafter=None, shapes=SHAPES, backend="eager").engine.tree
    width = SHAPES.verify_widths[-1]
    start, order = tree.tokens.new_zeros(1), tree.tokens.new_zeros(tree.num_nodes)
    inputs = runner.arguments([start, order[:width], *tree.tensors()])
    exported = _exported(VerifyStep(runner.call), inputs, VerifyStep.wide)
    drop_assertions(exported)
    found = find_repetition(exported.graph_module.graph)

    assert found is not None
    assert len(found.units) == LAYERS
    assert found.read_elsewhere() == handed_out


@pytest.mark.compiled
@pytest.mark.skipif(not is_native(), reason="no compiler here")
def test_compiled_layers_that_repeat_hand_out_the_states_of_those_that_are_read(target, tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    read = (0, 2, 3)
    eager, compiled = (states_of(target, read, backend) for backend in ("eager", "inductor"))

    assert len(eager) == len(compiled) == len(read)
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not any(torch.allclose(ours, theirs) for ours, theirs in pairwise(eager)), "they would tell nothing apart"


def states_of(target, read, backend):
    """What a plain step says of the layers ``read``, [1, H] each."""
    runner = ModelRunner(target, SHAPES.cache_capacity, target.vocab_size, backend, read)
    runner.define("plain", 1, PlainStep(runner.call), [torch.tensor([5]), torch.tensor([0])])
    _, _, _, *layers = runner.step("plain", 1)()
    return [layer.clone() for layer in layers]
