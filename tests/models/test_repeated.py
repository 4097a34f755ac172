"""Layers that repeat are found in whatever a step gives out of them."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from tiny_pair import SHAPES, make_pair

from yggdrasil.engine.build import assemble
from yggdrasil.engine.steps import VerifyStep
from yggdrasil.models import lowering
from yggdrasil.models.compiled import _exported
from yggdrasil.models.kernels import is_native
from yggdrasil.models.repeated import find_repetition
from yggdrasil.models.runner import ModelRunner
from yggdrasil.models.traced import HEAD_INPUT, RUNNERS_UP, PrefillStep
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
@pytest.mark.parametrize("stays_graph", [False, True], ids=["program", "graph"])
def test_compiled_layers_that_repeat_hand_out_the_states_of_those_that_are_read(tmp_path, monkeypatch, stays_graph):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    if stays_graph:
        monkeypatch.setattr(lowering, "lower_unit", lambda _: None)
    target, read = make_pair(num_hidden_layers=LAYERS, hidden_size=32).target, (0, 2, 3)
    eager, compiled = (states_of(target, read, backend) for backend in ("eager", "inductor"))

    units = list((tmp_path / "steps").glob("layers-*.pt2"))
    assert len(units) == stays_graph, "a program is no package, and a unit is one"
    assert len(eager) == len(compiled) == len(read)
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
def test_what_pytorch_unpacks_of_layers_is_gone_once_they_are_loaded(tmp_path, monkeypatch):
    """A process keeps units to its end: each start would leave two megabytes."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lowering, "lower_unit", lambda _: None)
    target = make_pair(num_hidden_layers=LAYERS, hidden_size=32, dtype=torch.bfloat16).target
    states_of(target, (), "inductor")
    (package,) = (tmp_path / "cache" / "steps").glob("prefill-*.pt2")
    script = (
        "import os; from pathlib import Path; from yggdrasil.models.packages import open_package;"
        f"open_package(Path({str(package)!r})); print(*os.listdir({str(tmp_path / 'unpacked')!r})); os._exit(0)"
    )
    (tmp_path / "unpacked").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "unpacked")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.split() == []
