"""Experts over quantised weights: what quantised linears compute, and the same bits for a row in any company."""

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Q
from gguf import quants
from test_experts import assert_rows_keep_to_themselves, check_widths, choices, native_only, new_experts, reader
from test_formats import DTYPES, EVERY_FORMAT, as_numbers, random_rows, rounded
from tiny import new_model
from torch import nn

from yggdrasil.checkpoints.experts import PackedExperts, expert_parts, form_of
from yggdrasil.checkpoints.formats.kinds import FORMATS
from yggdrasil.checkpoints.formats.layers import QuantisedExperts, QuantisedLinear, formats_of
from yggdrasil.checkpoints.formats.rounding import quantised_to_q4_1, rounding_to
from yggdrasil.checkpoints.formats.rows import QuantisedRows
from yggdrasil.checkpoints.packing import pack_linears
from yggdrasil.native.arena import Arena

ops = torch.ops.yggdrasil
pytestmark = native_only
SIZES = (7, 3, 256, 512)  # E, K, H, I: of an odd number of experts, some are chosen by no row
ODD = (5, 2, 32, 96)  # no number of outputs or inputs is whole pairs of panels or blocks of 256
MIXES = [(Q.Q4_K, Q.Q4_K, Q.Q6_K), (Q.Q8_0, Q.Q4_0, Q.Q5_1)]  # what llama.cpp's own files have, and any


def random_weights(forms, sizes):
    """Gate, up and down of every expert, [E, N, blocks]; other bits each."""
    num_experts, _, hidden, inner = sizes
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    found = []
    for seed, (form, (outputs, inputs)) in enumerate(zip(forms, shapes, strict=True)):
        blocks = random_rows(form, 1, 1).num_inputs
        rows = random_rows(form, num_experts * outputs, inputs // blocks, seed)
        found.append(QuantisedRows(form, rows.blocks.view(num_experts, outputs, -1)))
    return found


def packed(weights, is_gelu=False, num_threads=2):
    return QuantisedExperts([each.pack(Arena()) for each in weights], is_gelu, num_threads)


def one_by_one(weights, is_gelu, rows, index, shares):
    """By quantised linears over each expert's weights, added up in the order of the experts' numbers."""
    output = torch.zeros_like(rows)
    for expert in range(len(weights[0].blocks)):
        gate, up, down = (QuantisedRows(each.format, each.blocks[expert]).pack(Arena()) for each in weights)
        places, chosen = torch.where(index.t() == expert)
        if len(chosen) == 0:
            continue
        first, second = (QuantisedLinear(each, None, 1)(rows[chosen]) for each in (gate, up))
        around = (second, first, is_gelu, None, False, 0.0, None)
        (given,) = ops.quantised_linears(*around, [down.packed], [None], [down.num_outputs], [down.format], 1)
        given = (given * shares[chosen, places, None]).to(rows.dtype)
        for row, values in zip(chosen, given, strict=True):
            output[row] += values
    return output


@DTYPES
@pytest.mark.parametrize(
    ("forms", "sizes"),
    [
        *(((form,) * 3, SIZES) for form in FORMATS),
        *((forms, SIZES) for forms in MIXES),
        ((Q.Q4_1, Q.Q5_0, Q.Q8_0), ODD),
    ],
    ids=lambda value: "-".join(form.name for form in value) if isinstance(value[0], Q) else "",
)
def test_experts_compute_what_quantised_linears_do(dtype, forms, sizes):
    weights = random_weights(forms, sizes)
    for num_rows in (1, 2, 16, 40, 600):
        is_gelu = num_rows % 3 == 1
        given = choices(sizes, num_rows, dtype)
        output = packed(weights, is_gelu)(*given)

        assert output.dtype == dtype
        assert torch.equal(output, one_by_one(weights, is_gelu, *given)), f"{num_rows = }"


@DTYPES
@pytest.mark.parametrize("forms", MIXES)
def test_experts_multiply_rounded_rows_with_exact_weights(dtype, forms):
    """A number between two that 8 bits have may go to either, where sums differ in their last bits."""
    weights = random_weights(forms, SIZES)
    rows, index, shares = choices(SIZES, 16, dtype)
    output = packed(weights)(rows, index, shares).double()
    exact = torch.zeros_like(output)
    numbers = [as_numbers(QuantisedRows(each.format, each.blocks.flatten(0, 1))) for each in weights]
    gate, up, down = (each.unflatten(0, (SIZES[0], -1)) for each in numbers)
    for row, place in torch.cartesian_prod(torch.arange(16), torch.arange(SIZES[1])).tolist():
        expert = index[row, place]
        if expert < SIZES[0]:
            x = rounded(rows[row], forms[0])
            inner = (F.silu((gate[expert] @ x).to(dtype)) * (up[expert] @ x).to(dtype)).to(dtype)
            exact[row] += shares[row, place] * (down[expert] @ rounded(inner, forms[2]))

    tolerance = {torch.float32: 1e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(output, exact, rtol=tolerance, atol=tolerance * exact.abs().max().item())


@EVERY_FORMAT
@DTYPES
def test_what_a_row_is_given_does_not_depend_on_its_company(form, dtype):
    assert_rows_keep_to_themselves(packed(random_weights((form,) * 3, SIZES)), choices(SIZES, 120, dtype))


def test_rows_may_all_choose_one_expert_or_none():
    weights, (rows, index, shares) = random_weights(MIXES[0], SIZES), choices(SIZES, 20)
    experts = packed(weights)
    for chosen in (0, 6):
        same = torch.full_like(index[:, :1], chosen)
        assert torch.equal(experts(rows, same, shares[:, :1]), one_by_one(weights, False, rows, same, shares[:, :1]))
    assert not experts(rows, torch.full_like(index, SIZES[0]), shares).any()


def test_what_was_not_packed_for_the_experts_is_refused():
    experts, (rows, index, shares) = packed(random_weights(MIXES[1], (*ODD[:2], 64, 96))), choices(ODD, 4)
    with pytest.raises(RuntimeError, match="not packed for these experts"):
        experts(rows, index, shares)
    experts = packed(random_weights(MIXES[1], ODD))
    with pytest.raises(RuntimeError, match="expert 6 is chosen of 5"):
        experts(rows, torch.full_like(index, 6), shares)
    experts.down_proj = experts.down_proj[:-1]
    with pytest.raises(RuntimeError, match="not packed for these experts"):
        experts(rows, index, shares)


def mixture(quantise):
    """A model of experts alone, packed."""
    model = nn.ModuleDict({"experts": new_experts(ODD, dtype=torch.bfloat16)})
    pack_linears(model, 2, quantise)
    return model


def test_experts_are_quantised_where_all_of_their_weights_are():
    def but(*missing):
        return lambda name, weight: None if name in missing else rows[name]

    own = new_experts(ODD, dtype=torch.bfloat16)
    rows = dict(zip(expert_parts("experts", own, form_of(own)), random_weights(MIXES[1], ODD), strict=True))
    quantised = mixture(but())

    assert type(quantised["experts"]) is QuantisedExperts
    assert list(formats_of(quantised).values()) == [*MIXES[1]]
    for missing in rows:
        assert type(mixture(but(missing))["experts"]) is PackedExperts
        assert formats_of(mixture(but(missing))) == {}


def test_a_heads_experts_stay_full():
    assert type(mixture(quantised_to_q4_1)["experts"]) is PackedExperts


@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
def test_experts_are_quantised_to_the_format_of_all_weights(weights):
    model = new_model("qwen3_moe", torch.bfloat16, num_experts=5, num_hidden_layers=1)
    name, experts = "model.layers.0.mlp.experts", model.model.layers[0].mlp.experts
    parts, form = expert_parts(name, experts, form_of(experts)), Q[weights.upper()]
    for part, weight in parts.items():
        rows = rounding_to(weights, model)(part, weight)
        assert rows.format == form
        for blocks, matrix in zip(rows.blocks, weight, strict=True):
            assert torch.equal(blocks, torch.from_numpy(quants.quantize(matrix.detach().float().numpy(), form)))

    pack_linears(model, 2, rounding_to(weights, model))

    assert model.model.layers[0].mlp.experts.formats == [form] * 3


def in_blocks(name, weight):
    """All in 8 bits but experts, whose gate has 4, and in the last layer 5."""
    form = Q.Q8_0 if "experts.gate_proj" not in name else Q.Q5_1 if "layers.3" in name else Q.Q4_0
    values = weight.detach().float().contiguous().numpy()
    return QuantisedRows(form, torch.from_numpy(quants.quantize(values, form)))


@pytest.mark.slow
@pytest.mark.compiled
def test_a_row_of_a_compiled_mixture_has_the_same_bits_at_every_width(compile_cache):
    sizes = {"num_experts": 24, "num_experts_per_tok": 5, "norm_topk_prob": True, "num_hidden_layers": 4}
    model = new_model("qwen3_moe", torch.bfloat16, **sizes)
    check_widths(reader(model, "qwen3_moe", "inductor", in_blocks))

    assert [layer.mlp.experts.formats[0] for layer in model.model.layers] == [Q.Q4_0] * 3 + [Q.Q5_1]
