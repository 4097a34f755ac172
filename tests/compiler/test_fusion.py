"""Linears that read one tensor become one operator with what stands around them, and compute the same."""

import math
import operator

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import nn

from yggdrasil import native
from yggdrasil.checkpoints.formats.layers import QuantisedEmbedding, QuantisedLinear
from yggdrasil.checkpoints.formats.rows import QuantisedRows
from yggdrasil.checkpoints.packing import PackedLinear
from yggdrasil.compiler.compiled import StepKey, build_step
from yggdrasil.compiler.fusion import fuse_linears
from yggdrasil.compiler.units import drop_assertions
from yggdrasil.native.arena import Arena
from yggdrasil.native.portable import PORTABLE

SIZE = 64  # of a row


class Block(nn.Module):
    """Three layers over one input, one of them with a bias, and a fourth over another."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = (24, 16, 40)
        self.layers = nn.ModuleList(
            PackedLinear(
                torch.randn(size, 8, generator=generator), torch.ones(size) if size == 16 else None, 1, Arena()
            )
            for size in sizes
        )
        self.last = PackedLinear(torch.randn(4, sum(sizes), generator=generator), None, 1, Arena())

    def forward(self, x):
        return self.last(torch.cat([layer(x) for layer in self.layers], dim=-1))


def test_layers_of_one_input_become_one_operator():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    block = Block()
    exported = torch.export.export(block, (x,), strict=False)

    assert fuse_linears(exported) == 1

    targets = [node.target for node in exported.graph_module.graph.nodes]
    assert targets.count(torch.ops.yggdrasil.packed_linears.default) == 1
    assert targets.count(torch.ops.yggdrasil.packed_linear.default) == 1
    assert torch.equal(exported.module()(x), block(x))


class Layer(nn.Module):
    """What transformers' models do around linears: a norm before two, a gate before one, a residual behind it."""

    def __init__(self, linear, dtype, inner=96):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weight = nn.Buffer((1 + torch.randn(SIZE, generator=generator) / 4).to(dtype))
        self.gate, self.up, self.down = linear(inner, SIZE), linear(inner, SIZE), linear(SIZE, inner)

    def norm(self, x):
        whole = x.to(torch.float32)
        return self.weight * (whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class GemmaLayer(Layer):
    """Norms by one more than their weight before it rounds, one of them behind; a gate that is gelu."""

    def norm(self, x):
        whole = x.to(torch.float32)
        scaled = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (scaled * (1.0 + self.weight.to(torch.float32))).type_as(x)

    def forward(self, x):
        normed = self.norm(x)
        gated = nn.functional.gelu(self.gate(normed), approximate="tanh") * self.up(normed)
        return x + self.norm(self.down(gated))


class LayerThatShows(Layer):
    """The same with everything also read elsewhere, and the mean over another dimension: nothing but linears of one
    input may come together."""

    def norm(self, x):
        whole = x.to(torch.float32)
        return self.weight * (whole * torch.rsqrt(whole.pow(2).mean(-2, keepdim=True) + 1e-5)).to(x.dtype)

    def forward(self, x):
        normed = self.norm(x)
        silu = nn.functional.silu(self.gate(normed))
        down = self.down(silu * self.up(normed) + silu)
        return x + down, down


def full(dtype):
    generator = torch.Generator().manual_seed(3)
    return lambda n, k: PackedLinear(torch.randn(n, k, generator=generator).to(dtype) / 8, None, 2, Arena())


def quantised(n, k):
    return QuantisedLinear(packed_rows("Q4_0", n, k), None, 2)


LINEARS = {
    "float32": (full(torch.float32), torch.float32),
    "bfloat16": (full(torch.bfloat16), torch.bfloat16),
    "q4_0": (quantised, torch.bfloat16),
}
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(kind == "q4_0" and not native.is_native(), reason="native only"))
    for kind in LINEARS
]


@pytest.mark.parametrize(("block", "norms"), [(Layer, 0), (GemmaLayer, 1)])
@pytest.mark.parametrize("rows", [1, 3, 5, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_around_linears_is_computed_by_them(kind, rows, block, norms):
    linear, dtype = LINEARS[kind]
    layer = block(linear, dtype)
    x = 3 * torch.randn(1, rows, SIZE, generator=torch.Generator().manual_seed(rows)).to(dtype)
    x[0, 0] *= 40  # gates far from nought
    exported = torch.export.export(layer, (x,), strict=False)
    drop_assertions(exported)

    assert fuse_linears(exported) == 2 + norms

    targets = [str(node.target) for node in exported.graph_module.graph.nodes if node.op == "call_function"]
    computing = [target for target in targets if "getitem" not in target and "aten.to" not in target]
    linears = [f"yggdrasil.{'quantised' if kind == 'q4_0' else 'packed'}_linears.default"] * 2
    assert computing == linears + ["yggdrasil.norm_rows.default"] * norms
    fused = exported.module()(x)
    torch.testing.assert_close(fused, layer(x), **({"rtol": 0.02, "atol": 0.05} if dtype == torch.bfloat16 else {}))
    one = fused_for(1, layer)
    alone = [one(row[None, None]) for row in x[0]]
    assert torch.equal(torch.cat(alone, dim=1), fused)  # whatever rows travel with it


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_one_input_that_is_not_finite_leaves_no_output_that_is(kind, odd):
    linear, dtype = LINEARS[kind]
    x = torch.ones(1, 3, SIZE, dtype=dtype)
    x[0, 1, 7] = odd

    given = linear(40, SIZE)(x)

    assert given[0, ::2].isfinite().all()
    assert not given[0, 1].isfinite().any()


def fused_for(rows, layer):
    exported = torch.export.export(layer, (torch.zeros(1, rows, SIZE, dtype=layer.weight.dtype),), strict=False)
    drop_assertions(exported)
    fuse_linears(exported)
    return exported.module()


class LayerAndItsRows(Layer):
    """The same with what its linears read given out."""

    def forward(self, x):
        normed = self.norm(x)
        gated = nn.functional.silu(self.gate(normed)) * self.up(normed)
        return self.down(gated), normed, gated


def test_rows_that_are_read_elsewhere_are_made_once():
    layer = LayerAndItsRows(*LINEARS["float32"])
    exported = torch.export.export(layer, (torch.ones(1, 5, SIZE),), strict=False)
    drop_assertions(exported)

    assert fuse_linears(exported) == 1  # gate and up

    targets = [node.target for node in exported.graph_module.graph.nodes]
    assert targets.count(torch.ops.yggdrasil.packed_linear.default) == 1
    (fused,) = [node for node in exported.graph_module.graph.nodes if "packed_linears" in str(node.target)]
    assert (fused.args[1], fused.args[3]) == (None, None)


def test_what_others_read_too_is_left_alone():
    layer = LayerThatShows(*LINEARS["float32"])
    x = torch.randn(1, 5, SIZE, generator=torch.Generator().manual_seed(0))
    exported = torch.export.export(layer, (x,), strict=False)
    drop_assertions(exported)

    assert fuse_linears(exported) == 1  # gate and up

    for ours, theirs in zip(exported.module()(x), layer(x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_number_stays_so_through_norm_and_gate(kind):
    linear, dtype = LINEARS[kind]
    x = torch.ones(1, 2, SIZE, dtype=dtype)
    x[0, 1, 7] = float("nan")

    given = fused_for(2, Layer(linear, dtype))(x)

    assert given[0, 0].isfinite().all()
    assert given[0, 1].isnan().all()


class Head(nn.Module):
    """The best token of each row, as a step seeks it; and, where ``shows``, the logits too."""

    def __init__(self, linear, size, shows=False):
        super().__init__()
        self.linear, self.size, self.shows = linear(size, SIZE), size, shows

    def forward(self, x):
        logits = self.linear(x)[0, :, : self.size]
        best, tokens = torch.ops.yggdrasil.best_tokens(logits, 2)
        return (best, tokens, logits) if self.shows else (best, tokens)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [7, 64, 1003])
def test_no_logits_are_written_where_only_the_best_is_read(kind, size, rows):
    linear, dtype = LINEARS[kind]
    head = Head(linear, size)
    x = torch.randn(1, rows, SIZE, generator=torch.Generator().manual_seed(rows)).to(dtype)
    x[0, 0] = 0.0  # all are equal
    x[0, -1, 3] = math.nan if rows > 1 else 1.0
    exported = torch.export.export(head, (x,), strict=False)
    drop_assertions(exported)

    assert fuse_linears(exported) == 1

    computing = [node.target for node in exported.graph_module.graph.nodes if node.op == "call_function"]
    assert [target for target in computing if target is not operator.getitem] == [
        getattr(torch.ops.yggdrasil, "quantised_best" if kind == "q4_0" else "packed_best").default
    ]
    best, tokens = exported.module()(x)
    expected, places = head(x)
    assert torch.equal(tokens, places)
    torch.testing.assert_close(best, expected, rtol=0, atol=0, equal_nan=True)


def operators(kind, outputs, level=300):
    """A layer with a bias as two functions: with a residual, and where only the best is sought; and as itself."""
    ops, dtype = torch.ops.yggdrasil, LINEARS[kind][1]
    bias = level * torch.ones(outputs, dtype=dtype)  # where two bfloat16 are two apart, many outputs round to one
    bias[outputs // 2 :] += 2
    if kind == "q4_0":
        linear = QuantisedLinear(packed_rows("Q4_0", outputs, SIZE), bias, 2)
        of_one, of_all = (linear.format,), ([linear.format],)
    else:
        weight = torch.randn(outputs, SIZE, generator=torch.Generator().manual_seed(3)).to(dtype) / 8
        linear = PackedLinear(weight, bias, 2, Arena())
        of_one, of_all = (), ()
    family = "quantised" if kind == "q4_0" else "packed"
    best, linears = getattr(ops, f"{family}_best"), getattr(ops, f"{family}_linears")
    around = (None, False, None, False, 0.0)
    return (
        linear,
        lambda x, residual: linears(x, *around, residual, [linear.packed], [bias], [outputs], *of_all, 2)[0],
        lambda x: best(x, linear.packed, bias, outputs, *of_one, 2),
    )


@pytest.mark.parametrize("rows", [1, 4, 8, 40])
@pytest.mark.parametrize("outputs", [7, 40, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_a_residual_and_the_best_round_as_apart(kind, outputs, rows):
    linear, with_residual, best = operators(kind, outputs)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(1, rows, SIZE, generator=generator).to(LINEARS[kind][1])
    residual = torch.randn(1, rows, outputs, generator=generator).to(x.dtype)

    assert torch.equal(with_residual(x, residual), linear(x) + residual)

    # Below zero, the lanes of a panel that are no outputs would win.
    for layer, greatest_of in ((linear, best), operators(kind, outputs, level=-300)[::2]):
        greatest, tokens = greatest_of(x)
        expected, places = torch.ops.yggdrasil.best_tokens(layer(x)[0], 2)
        assert torch.equal(tokens, places)
        assert torch.equal(greatest, expected)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1], ids=["plus", "minus"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_that_is_not_a_number_stays_so_when_it_is_rounded(kind, bits):
    """Where all bits are set, rounding up would make it a zero."""
    linear, ops = operators(kind, 40)[0], torch.ops.yggdrasil
    bias = torch.tensor(bits, dtype=torch.int32).view(torch.float32).repeat(40)
    x = torch.ones(1, 2, SIZE, dtype=LINEARS[kind][1])
    multiply, of_one = (ops.quantised_linear, (linear.format,)) if kind == "q4_0" else (ops.packed_linear, ())
    given = multiply(x, linear.packed, bias, 40, *of_one, 2)

    assert given.isnan().all()


def gelu(x):
    """As sums of double precision have it where tanh is next to minus one."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@pytest.mark.parametrize(("is_gelu", "exact", "rtol"), [(False, nn.functional.silu, 1e-5), (True, gelu, 1e-4)])
def test_gates_of_any_size_are_what_they_are_in_double_precision(is_gelu, exact, rtol):
    """At -88.5 the power of two in it is one beyond the largest; further down there is none."""
    some = [-1e30, -1000.0, -100.0, -88.5, -88.0, -50.0, -4.0, -1.0, 0.0, 1.0, 3.0, 50.0, 88.5, 1000.0]
    gates = torch.tensor([*some, *some, *some[:4]])
    weight, ops = torch.eye(len(gates)), torch.ops.yggdrasil
    packed = torch.zeros(ops.packed_shape(weight))
    ops.pack_linear(weight, packed)
    x = torch.ones(1, 1, len(gates))
    gate = (gates.view_as(x), is_gelu)
    (given,) = ops.packed_linears(x, *gate, None, False, 0.0, None, [packed], [None], [len(gates)], 1)

    torch.testing.assert_close(given[0, 0].double(), exact(gates.double()), rtol=rtol, atol=1e-38)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [64, 40])
@pytest.mark.parametrize("plus_one", [False, True])
def test_norms_round_as_the_models_own_code_does(plus_one, size, dtype):
    """Over numbers whose squares have one sum, in whatever order."""
    generator = torch.Generator().manual_seed(0)
    x = (2.0 ** torch.randint(-2, 3, (2, 9, size), generator=generator)).to(dtype)
    weight, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in ((size,), (2, 9, size)))
    for added in (None, residual):
        arguments = (x, weight, plus_one, 1e-5, added, 2)
        assert torch.equal(torch.ops.yggdrasil.norm_rows(*arguments), PORTABLE["norm_rows"](*arguments))


def test_logits_that_are_read_are_written():
    head = Head(*LINEARS["float32"][:1], 40, shows=True)
    exported = torch.export.export(head, (torch.ones(1, 3, SIZE),), strict=False)
    drop_assertions(exported)

    assert fuse_linears(exported) == 0


class QuantisedBlock(nn.Module):
    """Layers over one input in two formats and in full, behind a quantised embedding."""

    def __init__(self):
        super().__init__()
        self.table = QuantisedEmbedding(packed_rows("Q8_0", 40), torch.bfloat16)
        bias = torch.ones(16, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(
            [
                QuantisedLinear(packed_rows("Q4_0", 24), None, 1),
                QuantisedLinear(packed_rows("Q5_1", 16), bias, 1),
                PackedLinear(torch.ones(8, 64, dtype=torch.bfloat16), None, 1, Arena()),
            ]
        )

    def forward(self, ids):
        x = self.table(ids)
        return [layer(x) for layer in self.layers]


class OverTensors(nn.Module):
    """A block as steps are written: its tensors are inputs."""

    def __init__(self, block, names):
        super().__init__()
        self.block, self.names = (block,), names  # no submodule

    def forward(self, weights, caches, *inputs):
        return torch.func.functional_call(self.block[0], dict(zip(self.names, weights, strict=True)), inputs)


def packed_rows(name, num_outputs, num_inputs=64):
    form = GGMLQuantizationType[name]
    generator = torch.Generator().manual_seed(num_outputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).numpy() / 8
    return QuantisedRows(form, torch.from_numpy(quants.quantize(weight, form))).pack(Arena())


class Interrupted(GemmaLayer):
    """What no program takes together: something else is done between a norm, a gate and a norm behind."""

    def forward(self, x):
        up = self.up(self.norm(x))
        down = self.down(nn.functional.gelu(-up, approximate="tanh") * (up + 1))
        return -down + self.norm(down)


class Together(nn.Module):
    """All that is compiled here, in one package."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Interrupted(*LINEARS[kind]) for kind in ("bfloat16", "q4_0"))
        self.block = QuantisedBlock()

    def forward(self, x, ids):
        return [*(layer(x) for layer in self.layers), *self.block(ids)]


@pytest.mark.compiled
@pytest.mark.skipif(not native.is_native(), reason="no C++ compiler on this machine")
def test_norms_gates_and_quantised_layers_of_one_input_are_fused_and_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    together, ids = Together(), torch.tensor([[3, 0, 39]])
    x = torch.randn(1, 3, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    exported = torch.export.export(together, (x, ids), strict=False)
    drop_assertions(exported)

    assert fuse_linears(exported) == 3 + 3 + 1
    targets = [node.target for node in exported.graph_module.graph.nodes]
    assert targets.count(torch.ops.yggdrasil.quantised_linears.default) == 2 + 1
    assert targets.count(torch.ops.yggdrasil.packed_linear.default) == 1
    tensors = dict(together.named_buffers())
    inputs = [list(tensors.values()), [torch.zeros(1)], x, ids]
    given = build_step(OverTensors(together, list(tensors)), inputs, StepKey("layers", 3, "", ""), "inductor")()
    apart = [*exported.module()(x, ids)[:2], *together.block(ids)]
    for ours, theirs in zip(given, apart, strict=True):
        assert torch.equal(ours, theirs)
