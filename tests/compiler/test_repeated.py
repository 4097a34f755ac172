"""Layers that repeat are found in whatever a step gives out of them."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from tiny_pair import SHAPES, make_pair

from yggdrasil.compiler import lowering
from yggdrasil.compiler.compiled import _exported
from yggdrasil.compiler.repeated import find_repetition
from yggdrasil.compiler.units import drop_assertions
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.targets.steps import VerifyStep
from yggdrasil.native import is_native
from yggdrasil.runtime.forward import HEAD_INPUT, RUNNERS_UP
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.runtime.traced import PrefillStep

LAYERS, READ = 6, (0, 2, 3)


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


def compile_layers(target, folder, *, stays_graph):
    """States of the layers ``READ`` by compiled steps, whose packages are kept in ``folder``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YGGDRASIL_CACHE", str(folder))
        if stays_graph:
            patch.setattr(lowering, "lower_unit", lambda _: None)
        return states_of(target, READ, "inductor")


@pytest.fixture(scope="module")
def as_graph(target, compile_cache):
    """Where the packages of layers that are no program lie, and the states that they give."""
    return compile_cache, compile_layers(target, compile_cache, stays_graph=True)


@pytest.mark.compiled
@pytest.mark.skipif(not is_native(), reason="no compiler here")
@pytest.mark.parametrize("stays_graph", [False, True], ids=["program", "graph"])
def test_compiled_layers_that_repeat_hand_out_the_states_of_those_that_are_read(tmp_path, target, request, stays_graph):
    if stays_graph:
        folder, compiled = request.getfixturevalue("as_graph")
    else:
        folder, compiled = tmp_path, compile_layers(target, tmp_path, stays_graph=False)
    eager = states_of(target, READ, "eager")

    units = list((folder / "steps").glob("layers-*.pt2"))
    assert len(units) == stays_graph, "a program is no package, and a unit is one"
    assert len(eager) == len(compiled) == len(READ)
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not any(torch.allclose(ours, theirs, 0.1, 0.1) for ours, theirs in pairwise(eager)), "they tell layers apart"


def states_of(target, read, backend):
    """What a prefill of four tokens says of the layers ``read``, [4, H] each: one row's layers are not shared."""
    runner = ModelRunner(target, SHAPES.cache_capacity, target.vocab_size, backend, read)
    tokens, start, last = (torch.tensor(values) for values in ([5, 6, 7, 8], [0], [3]))
    runner.define("prefill", 4, PrefillStep(runner.call), [tokens, start, last])
    return [output.clone() for output in runner.step("prefill", 4)()[-len(read) :]]


@pytest.mark.compiled
@pytest.mark.skipif(not is_native() or sys.platform != "linux", reason="only Linux says what is mapped")
def test_what_pytorch_unpacks_of_layers_is_gone_once_they_are_loaded(as_graph, tmp_path):
    """A process keeps units to its end: each start would leave two megabytes."""
    folder, _ = as_graph
    (package,) = (folder / "steps").glob("prefill-*.pt2")
    script = (
        "import os; from pathlib import Path; from yggdrasil.compiler.packages import open_package;"
        f"open_package(Path({str(package)!r})); print(*os.listdir({str(tmp_path)!r})); os._exit(0)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.split() == []
