"""Layers that repeat are found in whatever a step gives out of them."""

import pytest
from tiny_pair import SHAPES, make_pair

from yggdrasil.engine.build import assemble
from yggdrasil.engine.steps import VerifyStep
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
    ("read", "runs"),
    [
        ((), [range(6)]),
        ((HEAD_INPUT, RUNNERS_UP), [range(6)]),
        ((1, 3), [range(2), range(2, 4), range(4, 6)]),
        ((0, 2, 4), [range(1), range(1, 3), range(3, 5), range(5, 6)]),
    ],
    ids=str,
)
def test_states_that_a_drafter_reads_part_runs_and_take_no_layer_out_of_them(target, read, runs):
    runner = ModelRunner(target, SHAPES.cache_capacity, target.vocab_size, "eager", read)
    tree = assemble(target, drafter=None, shapes=SHAPES, backend="eager").engine.tree
    width = SHAPES.verify_widths[-1]
    start, order = tree.tokens.new_zeros(1), tree.tokens.new_zeros(tree.num_nodes)
    inputs = runner.arguments([start, order[:width], *tree.tensors()])
    exported = _exported(VerifyStep(runner.call), inputs, VerifyStep.wide)
    drop_assertions(exported)
    found = find_repetition(exported.graph_module.graph)

    assert found is not None
    assert list(found.runs()) == runs
