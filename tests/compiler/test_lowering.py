"""Layers that repeat become a program that computes what their graph does, to the bit, caches included."""

import copy
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from test_fusion import LINEARS
from tiny import LAYERS, VOCAB_SIZE, new_model
from torch import nn

from yggdrasil.checkpoints.packing import PackedLinear
from yggdrasil.compiler.chains import chain_linears
from yggdrasil.compiler.compiled import _exported
from yggdrasil.compiler.fusion import fuse_linears
from yggdrasil.compiler.lowering import lower_unit
from yggdrasil.compiler.plain_linears import keep_sums
from yggdrasil.compiler.repeated import find_repetition
from yggdrasil.compiler.units import drop_assertions, replace_units
from yggdrasil.native import is_native
from yggdrasil.native.arena import Arena
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.runtime.traced import CallStep

pytestmark = pytest.mark.skipif(not is_native(), reason="no C++ compiler on this machine")
LOWERED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "exaone4")
# These join linears, turn otherwise, norm all heads as one or have experts.
OTHERS = ("gpt2", "gpt_neox", "mixtral", "olmo2", "phi3", "qwen3_moe")
NORMS_HEADS = ("qwen3", "gemma3", "exaone4")  # by sums of squares in another order than the graph's
CONTEXT, THREADS = 21, 2
# Below the root two paths of different lengths, rows not in the order of the paths; then rows of one long path.
TREES = {"plain": (-1,), "tree": (-1, 0, 0, 2, 1, 3, 5), "path": tuple(range(-1, 19))}
SLOTS = 20  # of the largest of them


class RowsStep(CallStep):
    """Logits of the rows chosen and the states of the layers asked for, behind whatever the caches hold."""

    wide = (0,)

    def forward(self, weights, caches, chosen, tokens, positions, mask, offsets):
        rows = tokens[chosen], positions[chosen], mask[chosen][:, chosen]
        logits, hidden, layers = self._call(weights, caches, *rows, offsets)
        return logits, hidden, *layers


def path_of(parents, node):
    return [] if node < 0 else [*path_of(parents, parents[node]), node]


def rows_of(parents, context=CONTEXT, path=None, slots=SLOTS):
    """Inputs of a step whose rows form a tree; or are the tokens of a path in it."""
    paths = [path_of(parents, node) for node in range(len(parents))]
    mask = torch.zeros(slots, slots, dtype=torch.bool)
    for node, above in enumerate(paths):
        mask[node, above] = True
    tokens = torch.randint(1, VOCAB_SIZE, (slots,), generator=torch.Generator().manual_seed(4))
    positions = torch.tensor([context + len(above) - 1 for above in paths] + [context] * (slots - len(paths)))
    chosen = torch.tensor(range(len(parents)) if path is None else path)
    return [chosen, tokens, positions, mask, torch.tensor([context, context])]


@cache
def exported_step(family, dtype, read, width, capacity, slots, changes):
    """A step's graph with its linears fused, of all widths above 1 where ``width`` is None, its weights and caches."""
    loaded = prepare_model(new_model(family, dtype, **dict(changes)), family, num_threads=THREADS)
    runner = ModelRunner(loaded, capacity, VOCAB_SIZE, "eager", read)
    generator = torch.Generator().manual_seed(3)
    for rows in runner.cache.tensors():
        rows.copy_(torch.randn(rows.shape, generator=generator))
    table = torch.zeros(1, dtype=torch.int64)  # behind the caches, its number
    tensors = [runner.weights, [*runner.cache.tensors(), table]]
    step, inputs = RowsStep(runner.call), [*tensors, *rows_of((-1,), slots=slots)]
    exported = _exported(step, inputs, step.wide if width is None else ())
    drop_assertions(exported)
    keep_sums(exported)
    fuse_linears(exported)
    return exported, tensors


def graph_of(family, dtype, parents, path=None, read=(0, 1), capacity=64, context=CONTEXT, slots=SLOTS, **changes):
    """A step's graph, which is the caller's own, its inputs, and what repeats in it."""
    rows = rows_of(parents, context, path, slots)
    width = 1 if len(rows[0]) == 1 else None
    made, tensors = exported_step(family, dtype, read, width, capacity, slots, tuple(changes.items()))
    exported = copy.deepcopy(made)
    return exported, [*tensors, *rows], find_repetition(exported.graph_module.graph)


def run(exported, inputs):
    """Outputs, and the caches after it, of copies."""
    weights, caches, *rows = inputs
    caches = [cache.clone() for cache in caches]
    number = torch.ops.yggdrasil.keep_table([*weights, *caches])
    caches[-1].fill_(number)
    try:
        outputs = exported.module(check_guards=False)(weights, caches, *rows)
    finally:
        torch.ops.yggdrasil.drop_table(number)
    return [*outputs, *caches[:-1]]


def lower(exported, inputs, found):
    program, num_threads = lower_unit(found)
    behind = (program.code, program.numbers, num_threads)
    table = len(inputs[0]) + len(inputs[1]) - 1
    replace_units(exported, found, table, torch.ops.yggdrasil.run_layers.default, (), behind)
    exported.graph_module.recompile()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", LOWERED)
def test_a_program_computes_what_the_layers_graph_does(family, tree, dtype):
    exported, inputs, found = graph_of(family, dtype, TREES[tree])
    assert found is not None
    assert len(found.units) == LAYERS
    by_graph = run(exported, inputs)

    lower(exported, inputs, found)

    targets = [node.target for node in exported.graph_module.graph.nodes]
    assert targets.count(torch.ops.yggdrasil.run_layers.default) == 1
    assert torch.ops.yggdrasil.tree_attention.default not in targets
    by_program = run(exported, inputs)
    before = list(inputs[1][:-1])
    assert len(by_graph) == len(by_program) == 2 + 2 + len(before)
    for ours, theirs in zip(by_program, by_graph, strict=True):
        if family in NORMS_HEADS:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(ours, theirs)
    assert not any(torch.equal(now, then) for now, then in zip(by_program[-len(before) :], before, strict=True)), (
        "caches are written"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", LOWERED)
def test_a_row_has_the_same_bits_in_a_tree_and_behind_its_path_alone(family, dtype):
    parents = TREES["tree"]
    exported, inputs, found = graph_of(family, dtype, parents)
    lower(exported, inputs, found)
    in_tree = run(exported, inputs)[0]
    for node in range(len(parents)):
        exported, inputs, found = graph_of(family, dtype, parents, path_of(parents, node))
        lower(exported, inputs, found)
        assert torch.equal(run(exported, inputs)[0][-1], in_tree[node])


@pytest.mark.parametrize("family", OTHERS)
def test_a_row_has_the_same_bits_where_layers_stay_graphs(family):
    parents = TREES["tree"]
    exported, inputs, _ = graph_of(family, torch.bfloat16, parents)
    chain_linears(exported)
    in_tree = run(exported, inputs)[0]
    for node in (0, len(parents) - 1):
        exported, inputs, _ = graph_of(family, torch.bfloat16, parents, path_of(parents, node))
        chain_linears(exported)
        assert torch.equal(run(exported, inputs)[0][-1], in_tree[node])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_layers_that_alternate_are_a_program_of_several_and_others_behind_it_a_graph(dtype):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    changes = {"num_hidden_layers": 7, "layer_types": (*kinds, *kinds, "sliding_attention")}
    exported, inputs, found = graph_of("gemma3", dtype, TREES["path"], read=(), **changes)
    by_graph = run(exported, inputs)

    lower(exported, inputs, found)

    targets = [node.target for node in exported.graph_module.graph.nodes]
    assert len(found.units) == 2
    assert targets.count(torch.ops.yggdrasil.tree_attention.default) == 1
    for ours, theirs in zip(run(exported, inputs), by_graph, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", LOWERED)
def test_chains_of_layers_that_no_program_has_read_each_other(family):
    exported, inputs, _ = graph_of(family, torch.bfloat16, TREES["tree"])
    by_graph = run(exported, inputs)

    assert chain_linears(exported) == LAYERS

    assert all(map(torch.equal, run(exported, inputs), by_graph))


@pytest.mark.parametrize("family", OTHERS)
def test_layers_that_do_something_else_stay_graphs(family):
    *_, found = graph_of(family, torch.bfloat16, TREES["tree"])

    assert found is None or lower_unit(found) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [20, 64, 72])
def test_heads_are_turned_alike_whether_they_fill_registers_or_not(head_dim, dtype):
    changes = {"head_dim": head_dim, "num_attention_heads": 6, "num_key_value_heads": 3}
    exported, inputs, found = graph_of("llama", dtype, TREES["tree"], **changes)
    by_graph = run(exported, inputs)

    lower(exported, inputs, found)

    assert all(map(torch.equal, run(exported, inputs), by_graph))


def test_keys_that_are_turned_otherwise_than_queries_stay_a_graph():
    *_, found = graph_of("llama", torch.bfloat16, TREES["tree"])
    assert lower_unit(found) is not None
    (call,) = (node for node in found.units[-1] if node.target is torch.ops.yggdrasil.tree_attention.default)
    straight, crossed = call.args[1].args
    (heads, cos), (others, sin) = straight.args, crossed.args
    straight.args, crossed.args = (heads, sin), (others, cos)

    assert lower_unit(found) is None


def test_heads_that_are_normed_otherwise_than_keys_stay_a_graph():
    *_, found = graph_of("gemma3", torch.bfloat16, TREES["tree"])
    assert lower_unit(found) is not None
    adding = [node for node in found.units[-1] if node.target is torch.ops.aten.add.Tensor]
    more = [node for node in adding if node.args[1:] == (1.0,)]  # one and the weight, of queries and of keys
    assert len(more) == 2
    more[0].args = (more[0].args[0], 2.0)

    assert lower_unit(found) is None


def test_a_step_that_does_not_fit_the_cache_is_refused():
    exported, inputs, found = graph_of("llama", torch.bfloat16, TREES["tree"])
    lower(exported, inputs, found)
    inputs[-1] = torch.tensor([60, 60])

    with pytest.raises(RuntimeError, match="step does not fit the cache"):
        run(exported, inputs)


def test_attention_to_a_long_text_leaves_the_memory_of_a_program_where_it_is():
    """In a process of its own: there, memory that was given back is gone, and whoever still reads it with it."""
    script = "import test_lowering; test_lowering.run_long()"
    folder = Path(__file__).parent
    path = os.pathsep.join([*sys.path, str(folder), str(folder.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"}

    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0


def run_long():
    """Rows that take more memory than is given back piece by piece, and scores that take more than these."""
    parents = tuple(range(-1, 399))
    sizes = {"capacity": 6000, "context": 5000, "slots": len(parents), "max_position_embeddings": 8192}
    exported, inputs, found = graph_of("llama", torch.bfloat16, parents, **sizes)
    lower(exported, inputs, found)
    assert all(output.isfinite().all() for output in run(exported, inputs))


class Chain(nn.Module):
    """A norm before two layers, a gate before the next, whose output is wanted itself and read by two more."""

    def __init__(self, linear, dtype):
        super().__init__()
        self.weight = nn.Buffer((1 + torch.randn(64, generator=torch.Generator().manual_seed(2)) / 4).to(dtype))
        self.gate, self.up, self.down, self.last, self.other = (linear(n, k) for n, k in SIZES)

    def forward(self, x, other):
        whole = x.to(torch.float32)
        normed = self.weight * (whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        down = x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return down, self.last(down) + other, self.other(other) + down


SIZES = ((96, 64), (96, 64), (64, 96), (32, 64), (64, 32))


class NormedChain(Chain):
    """As Gemma has it: norms by one more than their weight, before and behind; one that nothing is added to."""

    def norm(self, x):
        whole = x.to(torch.float32)
        scaled = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (scaled * (1.0 + self.weight.to(torch.float32))).type_as(x)

    def forward(self, x, other):
        first = x + self.norm(self.other(other))
        normed = self.norm(first)
        gated = nn.functional.gelu(self.gate(normed), approximate="tanh") * self.up(normed)
        down = self.norm(self.down(gated))
        return first + down, self.last(down) + other


@pytest.mark.parametrize("chain", [Chain, NormedChain])
@pytest.mark.parametrize("rows", [1, 3, 5, 40])
@pytest.mark.parametrize("kind", LINEARS)
def test_linears_that_read_each_other_become_one_program(kind, rows, chain):
    linear, dtype = LINEARS[kind]
    generator = torch.Generator().manual_seed(rows)
    x, other = (3 * torch.randn(1, rows, size, generator=generator).to(dtype) for size in (64, 32))
    exported = torch.export.export(chain(linear, dtype), (x, other), strict=False)
    drop_assertions(exported)
    fuse_linears(exported)
    apart = exported.module()(x, other)
    graph = exported.graph_module.graph
    used = dict.fromkeys(given for node in graph.nodes if _is_ours(node) for given in node.all_input_nodes)

    assert chain_linears(exported) == 1

    (program,) = (node for node in graph.nodes if node.target is torch.ops.yggdrasil.run_program.default)
    read = list(program.args[0])
    assert read == [node for node in used if node in read], "in the order of their first use, in every process"
    targets = [str(node.target) for node in exported.graph_module.graph.nodes if node.op == "call_function"]
    assert targets.count("yggdrasil.run_program.default") == 1
    assert not [target for target in targets if "_linear" in target or "norm_rows" in target]
    for ours, theirs in zip(exported.module()(x, other), apart, strict=True):
        assert torch.equal(ours, theirs)


def _is_ours(node):
    return str(node.target).startswith("yggdrasil.")


def test_a_layer_that_reads_what_is_made_between_is_not_of_the_chain():
    class Interrupted(Chain):
        def forward(self, x, other):
            down = x + self.down(self.gate(x))
            return self.last(down) + torch.sin(down)[..., :32].contiguous()

    x, other = torch.randn(1, 3, 64), torch.randn(1, 3, 32)
    exported = torch.export.export(Interrupted(LINEARS["float32"][0], torch.float32), (x, other), strict=False)
    fuse_linears(exported)
    apart = exported.module()(x, other)

    chain_linears(exported)

    assert torch.equal(exported.module()(x, other), apart)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ([0, 0, -1, 0, -1, 0, -1, 1, 1, -1, 8], "ends within a stage"),
        ([0, 0, -1, 0, -1], "ends within a stage"),
        ([0, 5, -1, 0, -1, 0, -1, 1, 1, -1, 8, -1], "tensor 5, which is not given"),
        ([0, 0, 9, 0, -1, 0, -1, 1, 1, -1, 8, -1], "value 9, which is not there"),
        ([0, 0, -1, 0, -1, 0, -1, 1, 7, -1, 8, -1], "tensor 7, which is not given"),
        ([0, 0, -1, 0, 1, 0, -1, 1, 1, -1, 8, -1], "size of the input"),
        ([0, 0, -1, 0, -1, 0, 0, 1, 1, -1, 8, -1], "size of the outputs"),
        ([1, 0, 0, 0, -1, -1, 0, 0, 0, 0, 0, 0], "begins with linear layers"),
        ([2, 0, 1, 0, -1], "size of the input"),
        ([2, 0, -1, 0, -1], "a norm has a weight"),
        ([2, 0, 1, 0], "ends within a stage"),
        ([3, 0, 1, 0, -1], "no stage of the kind 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_program_that_is_wrong_is_refused(code, fault):
    packed = PackedLinear(torch.randn(8, 4), None, 1, Arena()).packed
    with pytest.raises((RuntimeError, IndexError), match=fault):
        torch.ops.yggdrasil.run_program([torch.randn(2, 4), packed], code, [0.0] * 3, [0], 1)
