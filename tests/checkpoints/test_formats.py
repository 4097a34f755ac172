"""Weights of 4 to 8 bits: packed and multiplied as the ``gguf`` package reads them."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from tiny_pair import TEXT, OracleDrafter, TinyPair, random_model

from yggdrasil import native
from yggdrasil.checkpoints.formats.kinds import BLOCKS, FORMATS
from yggdrasil.checkpoints.formats.layers import QuantisedEmbedding, QuantisedLinear
from yggdrasil.checkpoints.formats.rounding import rounding_to
from yggdrasil.checkpoints.formats.rows import QuantisedRows
from yggdrasil.native.arena import Arena
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

ops = torch.ops.yggdrasil
pytestmark = pytest.mark.skipif(not native.is_native(), reason="no C++ compiler on this machine")
EVERY_FORMAT = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SHAPES = [(1, 1), (15, 2), (16, 3), (17, 5), (40, 8), (33, 13)]  # (N, blocks of K)
HALVES = {"Q6_K": [208]}  # where the scales of a block lie; at its beginning in other formats
SCALES = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}


def random_rows(form, num_outputs, num_blocks, seed=0):
    """Rows whose every bit is random but for their float16 scales, which stay moderate and of either sign."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_outputs, num_blocks, GGML_QUANT_SIZES[form][1]), dtype=np.uint8)
    first = HALVES.get(form.name, [0])[0]
    count = SCALES.get(form.name, 1)
    if form.name == "MXFP4":  # whose scales are powers of two, a byte each
        blocks[..., 0] = rng.integers(116, 124, (num_outputs, num_blocks))
        return QuantisedRows(form, torch.from_numpy(blocks.reshape(num_outputs, -1)))
    scales = rng.normal(0, 1e-2, (num_outputs, num_blocks, count)).astype(np.float16)
    blocks[..., first : first + 2 * count] = scales.view(np.uint8)
    return QuantisedRows(form, torch.from_numpy(blocks.reshape(num_outputs, -1)))


def test_formats_are_numbered_and_sized_as_the_package_has_them():
    assert {form.name: (int(form), BLOCKS[form]) for form in FORMATS} == {
        form.name: (int(GGMLQuantizationType[form.name]), GGML_QUANT_SIZES[GGMLQuantizationType[form.name]])
        for form in FORMATS
    }


def as_numbers(rows):
    """The weights by the ``gguf`` package, [N, K] float64."""
    return torch.from_numpy(quants.dequantize(rows.blocks.numpy(), rows.format)).double()


def rounded(x, form):
    """Rows as quantised linears see them: multiples of a 127th of the largest input of each block."""
    chunks = x.float().unflatten(-1, (-1, BLOCKS[form][0]))
    scale = chunks.abs().amax(-1, keepdim=True)
    inverse = torch.div(torch.full_like(scale, 127.0), scale)  # ``127 / scale`` is its reciprocal, rounded, times 127
    values = (chunks * torch.where(scale > 0, inverse, 0)).round()
    return (values.double() * (scale / 127).double()).flatten(-2)


@EVERY_FORMAT
@pytest.mark.parametrize("shape", SHAPES)
def test_an_embedding_gives_the_rows_as_numbers(form, shape):
    rows = random_rows(form, *shape)
    ids = torch.randint(0, shape[0], (2, 3), generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        embedding = QuantisedEmbedding(rows.pack(Arena()), dtype)

        assert torch.equal(embedding(ids), as_numbers(rows).float().to(dtype)[ids])
    with pytest.raises(RuntimeError, match=f"no row {shape[0]}"):
        embedding(torch.tensor([shape[0]]))


@EVERY_FORMAT
@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_linear_multiplies_rounded_rows_with_exact_weights(form, dtype, shape):
    rows = random_rows(form, *shape)
    weight, packed = as_numbers(rows), rows.pack(Arena())
    for num_rows in (1, 2, 3, 5, 8, 11, 16, 17, 40):
        torch.manual_seed(num_rows)
        x = torch.randn(1, num_rows, rows.num_inputs).to(dtype)
        bias = torch.randn(shape[0]).to(dtype) if num_rows % 2 else None
        output = QuantisedLinear(packed, bias, num_threads=1 + num_rows % 2)(x)
        exact = rounded(x, form) @ weight.T + (0 if bias is None else bias.double())

        assert output.dtype == dtype
        assert output.shape == exact.shape
        scale = exact.abs().max().item()
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype]
        torch.testing.assert_close(output.double(), exact, rtol=tolerance, atol=tolerance * scale)


@EVERY_FORMAT
@pytest.mark.parametrize("value", [0, 0x80, 0xFF], ids=["least", "sign", "greatest"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_products_of_the_largest_numbers_do_not_overflow(form, value, sign):
    rows = random_rows(form, 40, 3)
    scales = HALVES.get(form.name, [0])[0]
    blocks = rows.blocks.view(40, 3, -1)
    kept = blocks[..., scales : scales + 2 * SCALES.get(form.name, 1)].clone()
    blocks.fill_(value)
    blocks[..., scales : scales + kept.shape[-1]] = kept
    x = torch.full((1, 5, rows.num_inputs), sign)  # rounded to 127 each
    exact = x.double() @ as_numbers(rows).T

    output = QuantisedLinear(rows.pack(Arena()), None, 1)(x)

    torch.testing.assert_close(output.double(), exact, rtol=2e-6, atol=2e-6 * exact.abs().max().item())


@EVERY_FORMAT
@DTYPES
def test_a_row_has_the_same_bits_in_any_company(form, dtype):
    rows = random_rows(form, 40, 5)
    packed = rows.pack(Arena())
    torch.manual_seed(0)
    x = torch.randn(1, 40, rows.num_inputs).to(dtype)
    alone = torch.cat([QuantisedLinear(packed, None, 1)(x[:, i : i + 1]) for i in range(40)], dim=1)
    for num_rows in range(1, 41):
        together = QuantisedLinear(packed, None, 1 + num_rows % 2)(x[:, :num_rows])
        assert torch.equal(together, alone[:, :num_rows]), f"{num_rows = }"


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_a_sum_errs_no_more_than_by_llama_cpps_scheme(name):
    """There inputs are rounded to 8 bits too, with scales in float16 every 32 inputs, or in float32 every 256."""
    form = GGMLQuantizationType[name]
    rows = random_rows(form, 256, 1536 // BLOCKS[form][0])
    torch.manual_seed(0)
    x = torch.randn(64, 1536)
    exact = x.double() @ as_numbers(rows).T
    ours = QuantisedLinear(rows.pack(Arena()), None, 1)(x).double()
    if BLOCKS[form][0] == 256:
        blocks = x.double().unflatten(-1, (-1, 256))
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        theirs = ((blocks * (-127 / largest)).round() * (largest / -127)).flatten(-2) @ as_numbers(rows).T
    else:
        q8_0 = GGMLQuantizationType.Q8_0
        numbers = as_numbers(QuantisedRows(q8_0, torch.from_numpy(quants.quantize(x.numpy(), q8_0))))
        theirs = numbers @ as_numbers(rows).T

    assert (ours - exact).square().mean() <= 1.001 * (theirs - exact).square().mean()


@EVERY_FORMAT
def test_layers_of_one_input_may_have_different_formats(form):
    torch.manual_seed(0)
    weights = [random_rows(form, 24, 8 if form.name[-1] != "K" else 1), random_rows(GGMLQuantizationType.Q5_0, 17, 8)]
    x, bias = torch.randn(1, 5, 256), torch.randn(17)
    packed = [rows.pack(Arena()) for rows in weights]
    operands = [p.packed for p in packed], [None, bias], [24, 17], [p.format for p in packed]
    together = ops.quantised_linears(x, None, False, None, False, 0.0, None, *operands, 2)

    assert torch.equal(together[0], QuantisedLinear(packed[0], None, 1)(x))
    assert torch.equal(together[1], QuantisedLinear(packed[1], bias, 1)(x))


def test_packing_refuses_what_it_cannot_hold():
    rows = random_rows(GGMLQuantizationType.Q4_0, 4, 2)
    with pytest.raises(RuntimeError, match="no kernel for the GGUF type number 10"):
        ops.quantised_shape(rows.blocks, 10, 64)
    with pytest.raises(RuntimeError, match="blocks of 96 inputs"):
        ops.pack_quantised(rows.blocks, 2, 96, torch.empty(1, 576, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="packed shape"):
        ops.pack_quantised(rows.blocks, 2, 64, torch.empty(1, 575, dtype=torch.uint8))
    packed = rows.pack(Arena()).packed
    with pytest.raises(RuntimeError, match="not packed for this layer"):
        ops.quantised_linear(torch.zeros(1, 128), packed, None, 4, 2, 1)
    with pytest.raises(RuntimeError, match="bfloat16 or float32"):
        ops.quantised_linear(torch.zeros(1, 64, dtype=torch.float16), packed, None, 4, 2, 1)


def test_trees_over_quantised_weights_give_the_plain_text_and_its_cache():
    """Bit for bit, though inputs are rounded: a row is rounded by itself."""
    model = random_model()
    target = prepare_model(model, "tiny target", 1, quantise=rounding_to("q4_0", model))
    assert list(target.formats.values()).count(GGMLQuantizationType.Q4_0) == 7 * target.num_layers
    assert_trees_give_the_plain_text_and_its_cache(target)


def assert_trees_give_the_plain_text_and_its_cache(target):
    """By a drafter that knows it, in trees whose other nodes are wrong."""
    shapes = Shapes(
        max_length=80, draft_widths=(2,), max_depth=3, candidates=2, verify_widths=(1, 8), prefill_widths=(8,)
    )
    pair = TinyPair(target, target, target.model, target.model)
    plain = pair.decoder(PLAIN_POLICY, shapes, drafter=None)
    expected = plain.generate(TEXT[:12], max_new_tokens=50).tokens
    oracle = OracleDrafter([*TEXT[:12], *expected])
    tree = pair.decoder(FixedPolicy(TreeShape(2, 3, 8)), shapes, drafter=oracle)
    generation = tree.generate(TEXT[:12], max_new_tokens=50)

    assert generation.tokens == expected
    assert generation.metrics.aal > 1.5
    assert len(set(expected)) > 5
    length = len(TEXT[:12]) + 49
    for ours, theirs in zip(tree.assembly.target.cache.tensors(), plain.assembly.target.cache.tensors(), strict=True):
        assert torch.equal(ours[:, :length], theirs[:, :length])
