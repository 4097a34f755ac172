"""A head's greatest output is found through a copy in 8 bits, and is the one of the head itself to the bit."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from yggdrasil.checkpoints import screening
from yggdrasil.checkpoints.packing import PackedLinear, ScreenedLinear
from yggdrasil.native import is_native
from yggdrasil.native.arena import Arena
from yggdrasil.runtime.loading import prepare_model

pytestmark = pytest.mark.skipif(
    not (is_native() and torch.ops.yggdrasil.can_screen()), reason="no kernels or no products of bytes here"
)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
WIDTHS = (1, 2, 3, 5, 8, 9, 16, 17)
SHAPES = ((100, 64), (5007, 576), (300, 98), (1000, 34))  # outputs that fill no panel, inputs that fill no tile


def numbers(*shape, seed=0, dtype=BFLOAT16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def own_best(head, x):
    return torch.ops.yggdrasil.packed_best(x, head.packed, head.bias, head.out_features, 2)


def screened_best(head, x, copy=None):
    copy = head.copy if copy is None else copy
    return torch.ops.yggdrasil.screened_best(x, head.packed, head.bias, copy, head.factors, head.out_features, 2)


def assert_same(weight, bias, x):
    head = ScreenedLinear(weight, bias, 2, Arena())
    for width in WIDTHS:
        for rows in x.split(width):
            (best, place), (expected, own_place) = screened_best(head, rows), own_best(head, rows)
            assert torch.equal(place, own_place)
            torch.testing.assert_close(best, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bias", [None, 1.0, 1000.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_the_greatest_output_is_the_heads_own(dtype, shape, bias):
    weight, x = numbers(*shape, dtype=dtype), numbers(34, shape[1], seed=1, dtype=dtype)

    assert_same(weight, None if bias is None else bias * numbers(shape[0], seed=2, dtype=dtype), x)


CASES = {
    "outputs that are equal": lambda w, x: (w[torch.arange(len(w)) % 40], x),
    "outputs that are nearly equal": lambda w, x: (w[:1] + w / 1024, x),
    "no output above zero": lambda w, x: (-w.abs(), x.abs()),
    "zeros": lambda w, x: (w * 0, x),
    "one number far above the others": lambda w, x: (w, torch.cat([x[:, :-1], 1000 * x[:, -1:]], 1)),
    "weights far apart": lambda w, x: (w * 2.0 ** torch.randint(-20, 20, w.shape, generator=torch.Generator()), x),
    "small weights": lambda w, x: (w * 1e-30, x),
    "weights that units take for zero": lambda w, x: (w * 3e-38, x * 1e15),
    "small rows": lambda w, x: (w, x * torch.logspace(0, -38, len(x))[:, None]),
    "large products": lambda w, x: (w * 1e20, x * 1e18),
    "a row of zeros": lambda w, x: (w, x * (torch.arange(len(x)) % 3 > 0)[:, None]),
    "rows that are no numbers": lambda w, x: (w, x.index_fill(0, torch.tensor([3, 11]), torch.nan)),
    "rows that are infinite": lambda w, x: (w, x.index_fill(0, torch.tensor([5, 12]), torch.inf)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_so_it_is_where_numbers_are_unusual(dtype, case):
    weight, x = CASES[case](numbers(1500, 128, dtype=FLOAT32), numbers(34, 128, seed=1, dtype=FLOAT32))

    assert_same(weight.to(dtype).contiguous(), None, x.to(dtype))


@pytest.mark.parametrize("width", [1, 4, 16])
def test_the_copy_decides_which_panels_are_multiplied(width):
    """One that says that an output is far below the others hides it."""
    weight, x = numbers(3000, 256), numbers(width, 256, seed=1)
    head = ScreenedLinear(weight, None, 2, Arena())
    hidden = own_best(head, x)[1] // 16
    copy = head.copy.clone()
    copy[hidden] = 128

    places = screened_best(head, x, copy)[1]

    assert not set(places.tolist()) & set(own_best(head, x)[1].tolist())


def test_a_copy_of_another_layer_is_refused():
    head, other = (ScreenedLinear(numbers(size, 64), None, 2, Arena()) for size in (100, 160))

    with pytest.raises(RuntimeError, match="not made of this layer"):
        screened_best(head, numbers(1, 64), other.copy)


def test_bounds_hold_for_every_output():
    """They are what the proof rests on: no product with the copy is farther from the weights' own."""
    weight, x = numbers(500, 320, dtype=FLOAT32), numbers(16, 320, seed=1, dtype=FLOAT32)
    head = ScreenedLinear(weight, None, 2, Arena())
    scale, lost, left = head.factors.transpose(0, 1).reshape(3, -1)[:, :500].double()
    multiples = head.copy.transpose(1, 2).reshape(-1, 320)[:500].double() - 128
    copy = multiples * scale[:, None]

    assert torch.all((weight.double() - copy).norm(dim=1) <= lost)
    assert torch.all(copy.norm(dim=1) <= left)
    assert torch.all((x.double() @ (weight.double() - copy).T).abs() <= x.double().norm(dim=1)[:, None] * lost)
    assert lost.max() < 0.02 * left.max()


def small_model(vocab_size=128):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    return LlamaForCausalLM(config).to(BFLOAT16).eval()


def test_a_models_head_is_screened_where_it_is_large_and_finite(monkeypatch):
    assert type(prepare_model(small_model(), "small", 2).model.lm_head) is PackedLinear

    monkeypatch.setattr(screening, "_LEAST_BYTES", 1)
    layers = [
        each for each in prepare_model(small_model(), "small", 2).model.modules() if isinstance(each, PackedLinear)
    ]
    assert [type(each) for each in layers].count(ScreenedLinear) == 1
    assert isinstance(layers[-1], ScreenedLinear)

    broken = small_model()
    broken.lm_head.weight.data[5, 5] = torch.inf
    assert type(prepare_model(broken, "broken", 2).model.lm_head) is PackedLinear


def test_all_outputs_are_the_heads_own():
    head = ScreenedLinear(numbers(500, 64), None, 2, Arena())
    plain = PackedLinear(numbers(500, 64), None, 2, Arena())
    x = numbers(3, 64, seed=1)

    assert torch.equal(head(x), plain(x))


def by_lossy_weights(lead):
    """Two outputs of which rounding takes as much as it can from the second, and gives it to the first.

    What is lost is parallel to the row, so the bound is reached. The first is ``lead`` above the second, in sixteenths.
    """
    row, weights = torch.ones(256), torch.full((2, 256), 8.0)
    row[0], weights[:, 0] = 0.0, 127.0  # it decides the scale alone
    weights[0, 1:] -= 7 / 16
    weights[1, 1:] += 7 / 16
    weights[0, 1 : 1 + (223 + lead) // 2] += 2
    weights[:, -1] += 5
    return row, weights


def by_a_lossy_row():
    """The same by what rounding takes from the row, which is parallel to the weights; the outputs are a 300th apart."""
    row, weights = torch.full((256,), 8.4375 * 2.0**-15), torch.full((2, 256), -127.0)
    row[0], row[1] = 127 / 128, 2.0**-6
    weights[0, 0], weights[0, 1], weights[1, 0], weights[1, 1] = 16, 47, 0, 0
    weights[1, 2:] = 127.0
    return row, weights


@pytest.mark.parametrize("places", [(5, 77), (77, 5)], ids=["the hidden one behind", "the hidden one before"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize(
    ("row", "weights"), [by_lossy_weights(-1), by_lossy_weights(5), by_a_lossy_row()], ids=["greater", "equal", "row"]
)
def test_outputs_are_found_that_the_copy_hides(row, weights, dtype, places):
    """The copy takes an output for much less than another, though it is as great or greater."""
    weight = torch.zeros(96, 256)
    weight[list(places)] = weights / 16
    assert torch.equal(weight.to(dtype).float(), weight), "numbers that the dtype has"

    assert_same(weight.to(dtype), None, row.repeat(17, 1).to(dtype))


def test_weights_that_units_take_for_zero_promise_nothing():
    """Below the least normal number: all of them together would give more than the only output that is not zero."""
    least, weight = torch.finfo(BFLOAT16).tiny, torch.zeros(96, 256)
    weight[5], weight[77, :100] = least * 115 / 128, least

    assert_same(weight.to(BFLOAT16), None, torch.full((17, 256), 2.0**50, dtype=BFLOAT16))
