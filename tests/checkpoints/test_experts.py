"""A mixture's experts over packed weights: what transformers computes, and the same bits for a row in any company."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from tiny import VOCAB_SIZE, new_model, tiny_config, tiny_model
from torch import nn
from transformers import NemotronHConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from yggdrasil.checkpoints.experts import SQUARED_RELU, PackedExperts, form_of
from yggdrasil.checkpoints.packing import pack_linears
from yggdrasil.compiler.layer_calls import trace_step
from yggdrasil.native import is_native, portable
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.passes import CallStep
from yggdrasil.runtime.runner import ModelRunner

ops = torch.ops.yggdrasil
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
EXPERTS = {"mixtral": 6, "qwen3_moe": 24, "gpt_oss": 4}
MIXTURES = pytest.mark.parametrize("family", EXPERTS)
native_only = pytest.mark.skipif(not is_native(), reason="no C++ compiler on this machine")
TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 4e-2, "rtol": 2e-2}}
WIDTHS = (1, 2, 3, 8, 16, 40)
SIZES = [(4, 2, 64, 32), (8, 3, 50, 22), (5, 5, 130, 258), (3, 1, 2, 2)]  # (E, K, H, I)


class Experts(nn.Module):
    """Experts as transformers has them, of random weights; what it computes with them is ``forward``, its own."""

    def __init__(self, config, sizes=SIZES[0], act_fn=None, dtype=torch.float32):
        super().__init__()
        self.num_experts, _, hidden, inner = sizes
        self.gate_up_proj = nn.Parameter(torch.randn(self.num_experts, 2 * inner, hidden, dtype=dtype) / hidden**0.5)
        self.down_proj = nn.Parameter(torch.randn(self.num_experts, hidden, inner, dtype=dtype) / inner**0.5)
        self.act_fn = act_fn or nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """The example in transformers' own source."""
        final = torch.zeros_like(hidden_states)
        mask = F.one_hot(top_k_index, num_classes=self.num_experts + 1).permute(2, 1, 0)
        for expert in range(self.num_experts):
            places, rows = torch.where(mask[expert])
            gate, up = F.linear(hidden_states[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            given = F.linear(self.act_fn(gate) * up, self.down_proj[expert]) * top_k_weights[rows, places, None]
            final.index_add_(0, rows, given.to(final.dtype))
        return final


def new_experts(sizes=SIZES[0], act_fn=None, dtype=torch.float32, base=Experts, **form):
    """Decorated as transformers' classes are."""
    kind = use_experts_implementation(type("Some", (base,), {"forward": base.forward}), **form)
    config = tiny_config("qwen3_moe")
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return kind(config, sizes, act_fn, dtype)


def packed(experts):
    """What takes the place of ``experts`` in a model; themselves where nothing does."""
    model = nn.ModuleDict({"experts": copy.deepcopy(experts)})
    pack_linears(model, num_threads=2)
    return model["experts"]


def choices(sizes, num_rows, dtype=torch.float32, seed=0):
    """Rows, what they chose, and its weights: one chose an expert twice, one none, and all but that one the first."""
    num_experts, chosen, hidden, _ = sizes
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, hidden, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(num_experts, generator=generator)[:chosen] for _ in range(num_rows)])
    index[:, 0] = 0
    if num_rows > 2:
        index[1, -1] = index[1, 0]
        index[2] = num_experts
    return rows, index, torch.rand(num_rows, chosen, generator=generator)


@DTYPES
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("act_fn", [nn.SiLU(), nn.GELU(approximate="tanh")], ids=["silu", "gelu"])
def test_the_operator_computes_what_transformers_does(dtype, sizes, act_fn):
    experts = new_experts(sizes, act_fn, dtype)
    given = [experts.gate_up_proj.unflatten(1, (2, -1)).detach(), experts.down_proj.unsqueeze(1).detach()]
    behind = ([], sizes[-1], int(isinstance(act_fn, nn.GELU)), [])
    for num_rows in (1, 5, 40, 600):
        rows, index, weights = choices(sizes, num_rows, dtype)
        for shares in (weights, weights.to(dtype)):
            expected = experts(rows, index, shares)
            for kernel in (portable.packed_experts, ops.packed_experts):
                stacks = given if kernel is portable.packed_experts else [stack(weight) for weight in given]
                output = kernel(rows, index, shares, *stacks, *behind, 2)

                assert output.dtype == dtype
                torch.testing.assert_close(output, expected.detach(), **TOLERANCE[dtype])


@DTYPES
def test_experts_of_another_layout_with_biases_and_a_clamped_gate_are_packed(dtype):
    """gpt-oss's: [E, inputs, outputs], gate and up in turns; a clamp that acts on half of the rows."""
    config = tiny_config("gpt_oss")
    config._experts_implementation, config.swiglu_limit = "eager", 1.0
    torch.manual_seed(0)
    experts = GptOssExperts(config).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.15)
    sizes = (config.num_local_experts, 2, config.hidden_size, config.intermediate_size)
    form, found = form_of(experts), packed(experts)
    assert type(found) is PackedExperts
    assert form.joined(*form.gate_up(experts.gate_up_proj)).equal(experts.gate_up_proj)
    weights = torch.stack(form.gate_up(experts.gate_up_proj), 1), form.down(experts.down_proj)[:, None]
    for num_rows in (1, 5, 40):
        rows, index, shares = choices(sizes, num_rows, dtype)
        index = index.clamp(max=3)
        expected = experts(rows, index, shares.to(dtype)).detach()
        torch.testing.assert_close(found(rows, index, shares.to(dtype)), expected, **TOLERANCE[dtype])
        behind = (form.biases(experts), sizes[-1], 0, list(form.clamp), 1)
        ours = portable.packed_experts(rows, index, shares.to(dtype), *weights, *behind)
        torch.testing.assert_close(ours.detach(), expected, **TOLERANCE[dtype])
    assert_rows_keep_to_themselves(found, choices(sizes, 120, dtype))


@DTYPES
def test_experts_without_a_gate_are_packed(dtype):
    """Nemotron-H's, of squared ReLU."""
    config = NemotronHConfig(hidden_size=50, n_routed_experts=6, moe_intermediate_size=22)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    experts = NemotronHExperts(config).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.15)
    found, sizes = packed(experts), (6, 2, 50, 22)
    assert type(found) is PackedExperts
    for num_rows in (1, 5, 40):
        rows, index, shares = choices(sizes, num_rows, dtype)
        expected = experts(rows, index.clamp(max=5), shares.to(dtype)).detach()
        given = rows, index.clamp(max=5), shares.to(dtype)
        weights = experts.up_proj[:, None].detach(), experts.down_proj[:, None].detach()
        for ours in (found(*given), portable.packed_experts(*given, *weights, [], 22, SQUARED_RELU, [], 1)):
            torch.testing.assert_close(ours, expected, **TOLERANCE[dtype])
    assert_rows_keep_to_themselves(found, choices(sizes, 120, dtype))


def stack(weights):
    """Packed into memory that held something else."""
    shape = ops.packed_shape(weights[0, 0])
    places = torch.full((*weights.shape[:2], *shape), 77, dtype=weights.dtype)
    for matrix, place in zip(weights.flatten(0, 1), places.flatten(0, 1), strict=True):
        ops.pack_linear(matrix, place)
    return places


@native_only
@DTYPES
@pytest.mark.parametrize("sizes", SIZES)
def test_what_a_row_is_given_does_not_depend_on_its_company(dtype, sizes):
    assert_rows_keep_to_themselves(packed(new_experts(sizes, dtype=dtype)), choices(sizes, 120, dtype))


def assert_rows_keep_to_themselves(experts, given):
    """Whatever rows stand beside them, and however many threads there are; the third row chose no expert."""
    together = experts(*given)
    for width in WIDTHS:
        for first in (0, 1, 2, 77):
            part = experts(*(tensor[first : first + width] for tensor in given))
            assert torch.equal(part, together[first : first + width]), f"{width = }, {first = }"
    for experts.num_threads in (1, 3):
        assert torch.equal(experts(*given), together)
    assert not together[2].any(), "it chose none"


@native_only
@DTYPES
def test_a_rows_experts_are_added_up_in_the_order_of_their_numbers(dtype):
    """Each sum is rounded, as transformers' own code does it: another order would give other bits."""
    sizes = SIZES[2]
    experts, (rows, index, weights) = packed(new_experts(sizes, dtype=dtype)), choices(sizes, 40, dtype)
    order = index.argsort(dim=1)
    index, weights = index.gather(1, order).roll(2, dims=1), weights.gather(1, order).roll(2, dims=1)

    alone = [experts(rows, index[:, [place]], weights[:, [place]]) for place in (*range(2, sizes[1]), 0, 1)]
    ascending, descending = torch.zeros_like(rows), torch.zeros_like(rows)
    for given, last_first in zip(alone, alone[::-1], strict=True):
        ascending, descending = ascending + given, descending + last_first

    assert torch.equal(experts(rows, index, weights), ascending)
    assert not torch.equal(ascending, descending)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu_pytorch_tanh"])
def test_packed_experts_have_the_function_of_their_gate(name):
    experts, given = new_experts(act_fn=ACT2FN[name]), choices(SIZES[0], 9)

    assert type(packed(experts)) is PackedExperts
    torch.testing.assert_close(packed(experts)(*given), experts(*given).detach(), **TOLERANCE[torch.float32])


@native_only
def test_rows_that_choose_what_is_not_there_are_refused():
    experts, (rows, index, weights) = packed(new_experts()), choices(SIZES[0], 4)
    for wrong in (-1, 5):
        with pytest.raises(RuntimeError, match=f"expert {wrong} is chosen of 4"):
            experts(rows, torch.full_like(index, wrong), weights)
    with pytest.raises(RuntimeError, match="as many experts as it has weights for"):
        experts(rows, index, weights[:, :1])


class Clamped(Experts):
    """Gates as no operator does."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=1)) * up


class Shifted(new_experts().__class__):
    """Of a class that is served, but with a forward of its own."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights) + 1


def parallel(experts):
    experts._is_expert_parallel = True
    return experts


OTHERS = {
    "transposed": lambda: new_experts(is_transposed=True),
    "with a bias": lambda: new_experts(has_bias=True),
    "without a gate": lambda: new_experts(has_gate=False),
    "gates in turns": lambda: new_experts(is_concatenated=False),
    "normed behind": lambda: new_experts(has_post_expert_norm=True),
    "gated otherwise": lambda: new_experts(base=Clamped),
    "exact gelu": lambda: new_experts(act_fn=nn.GELU()),
    "in halves": lambda: new_experts(dtype=torch.float16),
    "odd sizes": lambda: new_experts((4, 2, 64, 31)),
    "shared among processes": lambda: parallel(new_experts()),
    "a forward of its own": lambda: Shifted(new_experts().config),
}


@pytest.mark.parametrize("name", OTHERS)
def test_experts_of_another_form_stay_as_they_are(name):
    experts = OTHERS[name]()

    assert type(packed(experts)) is type(experts)
    assert packed(experts).gate_up_proj.equal(experts.gate_up_proj)


@MIXTURES
def test_a_models_experts_are_packed_and_their_weights_are_held_once(family):
    model = tiny_model(family)
    own = [model.get_submodule(f"model.layers.{layer}.mlp.experts") for layer in (0, 1)]
    loaded = prepare_model(model, family, num_threads=1)

    assert [type(layer.mlp.experts) for layer in model.model.layers] == [PackedExperts] * 2
    assert not [weight for experts in own for name, weight in experts.named_parameters() if "bias" not in name]
    assert not [name for name, _ in model.named_parameters() if "experts" in name]
    assert {name for name in loaded.tensors if "experts" in name and "bias" not in name} == {
        f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")
    }


class RowsStep(CallStep):
    """All rows' logits, head inputs and the layers' states; rows of one text."""

    wide = (0,)

    def forward(self, weights, caches, tokens, start):
        rows = torch.arange(tokens.shape[0])
        mask = rows[:, None] >= rows[None, :]
        logits, hidden, layers = self._call(weights, caches, tokens, start + rows, mask, start.expand(2).contiguous())
        return logits, hidden, *layers


TEXT = torch.randint(1, VOCAB_SIZE, (48,), generator=torch.Generator().manual_seed(5))


def reader(model, family, backend, quantise=None):
    """Reads tokens of ``TEXT`` from a place on; gives what the step does."""
    loaded = prepare_model(model, family, num_threads=2, quantise=quantise)
    runner = ModelRunner(loaded, 64, VOCAB_SIZE, backend, (0, 1))
    start, inputs = torch.zeros(1, dtype=torch.int64), {}

    def read(first, width, tokens=None):
        if width not in inputs:
            inputs[width] = torch.zeros(width, dtype=torch.int64)
            runner.define("rows", width, RowsStep(runner.call), [inputs[width], start])
        inputs[width].copy_(TEXT[first : first + width] if tokens is None else tokens)
        start.fill_(first)
        return [output.clone() for output in runner.step("rows", width)()]

    return read


@native_only
@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [  # qwen3_moe in bfloat16: test_quantised_experts.py
        ("mixtral", torch.bfloat16),
        ("qwen3_moe", torch.float32),
    ],
    ids=["mixtral-bfloat16", "qwen3_moe-float32"],
)
def test_a_row_of_a_compiled_mixture_has_the_same_bits_at_every_width(family, dtype, compile_cache):
    # Five experts a row, of whose weights the sum could have several orders.
    sizes = {"num_experts": EXPERTS[family], "num_experts_per_tok": 5, "norm_topk_prob": True, "num_hidden_layers": 2}
    check_widths(reader(new_model(family, dtype, **sizes), family, "inductor"))


def check_widths(read):
    """Rows have the bits that they have alone."""
    alone = [torch.cat(parts) for parts in zip(*(read(place, 1) for place in range(len(TEXT))), strict=True)]
    for width in WIDTHS[1:]:
        for first in range(0, len(TEXT) - width + 1, width):
            together = read(first, width)
            for ours, theirs in zip(together, alone, strict=True):
                assert torch.equal(ours, theirs[first : first + width]), f"{width = }, {first = }"


@MIXTURES
def test_a_mixtures_greedy_tokens_are_those_of_transformers(family):
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    expected = model.generate(TEXT[None, :8], max_new_tokens=32, do_sample=False, eos_token_id=-1)[0, 8:]
    read, tokens = reader(tiny_model(family), family, "eager"), []
    (logits, *_), place = read(0, 8), 8
    while len(tokens) < 32:
        tokens.append(int(logits[-1].argmax()))
        logits, *_ = read(place, 1, torch.tensor(tokens[-1:]))
        place += 1

    assert tokens == expected.tolist()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (4, 64), (33, 129), (128, 300)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_plain_linear_is_a_linear_and_its_rows_do_not_depend_on_their_company(dtype, shape, has_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(40, shape[1]).to(dtype), (torch.randn(shape) / math.sqrt(shape[1])).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    together = ops.plain_linear(x, weight, bias, 2)

    torch.testing.assert_close(together, F.linear(x, weight, bias), **TOLERANCE[dtype])
    if is_native():
        alone = [ops.plain_linear(row, weight, bias, threads) for row in x.split(1) for threads in (1, 3)]
        assert torch.equal(torch.cat(alone[::2]), together)
        assert torch.equal(torch.cat(alone[1::2]), together)


@MIXTURES
def test_a_router_gives_a_row_the_same_sums_at_any_width(family):
    runner = ModelRunner(prepare_model(tiny_model(family), family, 2), 64, VOCAB_SIZE, "eager")
    module = RowsStep(runner.call)
    with module.tracing():
        step = trace_step(module, runner.arguments([TEXT[:4], torch.zeros(1, dtype=torch.int64)]))

    for layer in step.graphs:
        assert layer.graph.code.count("yggdrasil.plain_linear") == 1
