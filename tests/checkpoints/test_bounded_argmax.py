"""A head's greatest output is found through a copy in 8 bits, and is the one of the head itself to the bit."""

import pytest
import torch

from yggdrasil.checkpoints import head_copy
from yggdrasil.checkpoints.packing import PackedLinear
from yggdrasil.native import is_native
from yggdrasil.native.arena import Arena

pytestmark = pytest.mark.skipif(
    not (is_native() and torch.ops.yggdrasil.has_byte_products()), reason="no kernels or no products of bytes here"
)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
WIDTHS = (1, 2, 3, 5, 8, 9, 16, 17)
SHAPES = ((100, 64), (5007, 576), (300, 98), (1000, 34))  # outputs that fill no panel, inputs that fill no tile


def numbers(*shape, seed=0, dtype=BFLOAT16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class HeadWithCopy(PackedLinear):
    """A head and its copy in 8 bits."""

    def __init__(self, weight, bias, num_threads, arena):
        super().__init__(weight, bias, num_threads, arena)
        self.copy, self.factors = head_copy.copy_in_8_bits(weight, arena)


def own_best(head, x):
    return torch.ops.yggdrasil.packed_best(x, head.packed, head.bias, head.out_features, 2)


def bounded_argmax(head, x, copy=None):
    copy = head.copy if copy is None else copy
    return torch.ops.yggdrasil.bounded_argmax(x, head.packed, head.bias, copy, head.factors, head.out_features, 2)


def assert_same(weight, bias, x):
    head = HeadWithCopy(weight, bias, 2, Arena())
    for width in WIDTHS:
        for rows in x.split(width):
            (best, place), (expected, own_place) = bounded_argmax(head, rows), own_best(head, rows)
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
    head = HeadWithCopy(weight, None, 2, Arena())
    hidden = own_best(head, x)[1] // 16
    copy = head.copy.clone()
    copy[hidden] = 128

    places = bounded_argmax(head, x, copy)[1]

    assert not set(places.tolist()) & set(own_best(head, x)[1].tolist())


def test_a_copy_of_another_layer_is_refused():
    head, other = (HeadWithCopy(numbers(size, 64), None, 2, Arena()) for size in (100, 160))

    with pytest.raises(RuntimeError, match="not made of this layer"):
        bounded_argmax(head, numbers(1, 64), other.copy)


def test_bounds_hold_for_every_output():
    """They are what the proof rests on: no product with the copy is farther from the weights' own."""
    weight, x = numbers(500, 320, dtype=FLOAT32), numbers(16, 320, seed=1, dtype=FLOAT32)
    head = HeadWithCopy(weight, None, 2, Arena())
    scale, lost, left = head.factors.transpose(0, 1).reshape(3, -1)[:, :500].double()
    multiples = head.copy.transpose(1, 2).reshape(-1, 320)[:500].double() - 128
    copy = multiples * scale[:, None]

    assert torch.all((weight.double() - copy).norm(dim=1) <= lost)
    assert torch.all(copy.norm(dim=1) <= left)
    assert torch.all((x.double() @ (weight.double() - copy).T).abs() <= x.double().norm(dim=1)[:, None] * lost)
    assert lost.max() < 0.02 * left.max()


def test_a_copy_is_made_of_a_large_and_finite_head(monkeypatch):
    weight = numbers(128, 64)
    assert not head_copy.is_copy_faster(weight)
    monkeypatch.setattr(head_copy, "_LEAST_BYTES", 1)
    assert head_copy.is_copy_faster(weight)
    weight[5, 5] = torch.inf
    assert not head_copy.is_copy_faster(weight)
