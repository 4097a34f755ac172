"""The operators of captured steps: the portable ones against indexing, the Triton ones against the portable.

Triton's interpreter runs its kernels on a CPU, slowly: TRITON_INTERPRET=1 pytest tests/native/test_cuda_kernels.py,
where Triton is installed (with numpy older than 2.4; not Triton 3.9, whose interpreter refuses masks that ``&`` made).
On a GPU ``tests/gpu`` does the same.
"""

import importlib.util
import os
import sys

import pytest
import torch
from attention_case import AttentionCase
from examples import examples
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil import native
from yggdrasil.checkpoints.formats.kinds import BLOCKS, Format
from yggdrasil.native import portable, portable_quantised

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None,
    reason="needs Triton and TRITON_INTERPRET=1",
)


@st.composite
def accepted_rows(draw):
    """(start, rows padded to the width, how many are accepted, free slots behind the step)."""
    width = draw(st.integers(1, 20))
    rows = sorted({0, *draw(st.sets(st.integers(0, width - 1)))})
    return draw(st.integers(0, 30)), rows + [width - 1] * (width - len(rows)), len(rows), draw(st.integers(0, 5))


def assert_kept(function, start, rows, count, free, dtype):
    caches = [torch.randn(3, start + len(rows) + free, 20).to(dtype) for _ in range(4)]
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        cache[:, start : start + count] = cache[:, [start + row for row in rows[:count]]].clone()
    function(caches, torch.tensor([start]), torch.tensor(rows), torch.tensor([count]))

    for ours, theirs in zip(caches, expected, strict=True):
        end = start + count
        assert torch.equal(ours[:, :end], theirs[:, :end])
        assert torch.equal(ours[:, start + len(rows) :], theirs[:, start + len(rows) :])


@examples(100)
@given(accepted_rows())
def test_accepted_rows_are_kept(step):
    assert_kept(torch.ops.yggdrasil.keep_rows, *step, torch.bfloat16)


def test_without_triton_a_gpu_gets_the_portable_operators(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    native.cuda_operators.cache_clear()
    try:
        assert native.cuda_operators()["tree_attention"] is portable.tree_attention
        assert "no Triton" in capsys.readouterr().err
    finally:
        native.cuda_operators.cache_clear()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("window", [0, 1, 4, 70])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_triton_attention_equals_the_portable_one(dtype, window, softcap):
    """NOTE: the interpreter multiplies bfloat16 as if it were integers; float16 takes the same path on a GPU."""
    from yggdrasil.native import cuda

    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for seed in range(100, 102):
        case = AttentionCase(seed, dtype)
        sinks = case.sinks if seed % 2 else None
        output, *caches = case.run(cuda.tree_attention, window, softcap, sinks=sinks)
        expected, *expected_caches = case.run(portable.tree_attention, window, softcap, sinks=sinks)

        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
        for ours, theirs in zip(caches, expected_caches, strict=True):
            assert torch.equal(ours, theirs)


@pytest.fixture
def bfloat16_products(monkeypatch):
    """The interpreter multiplies bfloat16 as if it were integers; here it multiplies the numbers.

    In float64: NumPy's products in float32 depend on the row's place in a tile.
    """
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

    def numbers(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data.astype("float64")
        return _convert_float(handle.data, tl.bfloat16, tl.float32, None).view("float32").astype("float64")

    def multiply(self, a, b, added, *_):
        product = (numbers(a) @ numbers(b)).astype(added.data.dtype)
        return TensorHandle(product + added.data, added.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply)


@interpreted
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_of_triton_attention_has_the_same_bits_at_every_width(dtype, window, bfloat16_products, monkeypatch):
    """Of the first rows of a pass: later ones are not in their paths. On a GPU the tile decides the order of sums."""
    from yggdrasil.native import cuda, triton_kernels

    tiles = set()

    class Watched:
        def __init__(self, kernel):
            self._kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, **constants):
                tiles.add(tuple(sorted(constants.items())))
                self._kernel[grid](*arguments, **constants)

            return launch

    monkeypatch.setattr(triton_kernels, "attend_to_split", Watched(triton_kernels.attend_to_split))
    case = AttentionCase(1, dtype, width=24, num_context=150, group=4, head_dim=32)
    whole = case.run(cuda.tree_attention, window)[0]
    expected = case.run(portable.tree_attention, window)[0]
    torch.testing.assert_close(whole, expected, atol=2e-2, rtol=2e-2)
    for width in (1, 3, 9):
        assert torch.equal(case.first(width).run(cuda.tree_attention, window)[0], whole[:, :width])
    assert len(tiles) == 1


@interpreted
@pytest.mark.parametrize("window", [0, 4])
def test_triton_attention_of_few_of_a_steps_rows_is_theirs_among_all(window):
    """Draft heads read the states of few rows; the keys and values of all are written."""
    from yggdrasil.native import cuda

    attend = cuda.with_fallback({"tree_attention": None, "keep_rows": None})["tree_attention"]
    for seed in range(100, 104):
        case = AttentionCase(seed, torch.float32, has_fewer_queries=True)
        sinks = case.sinks if seed % 2 else None
        found, *caches = case.run(attend, window, sinks=sinks)
        expected, *expected_caches = case.run(portable.tree_attention, window, sinks=sinks)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(caches, expected_caches, strict=True):
            assert torch.equal(ours, theirs)


@interpreted
@examples(20)
@given(accepted_rows(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_triton_keeps_accepted_rows(step, dtype):
    from yggdrasil.native import cuda

    assert_kept(cuda.keep_rows, *step, dtype)


def random_blocks(form, num_rows, num_blocks):
    """Rows of blocks [N, bytes] with any bits, but for their scales: those are small numbers."""
    size = BLOCKS[form][1]
    blocks = torch.randint(0, 256, (num_rows, num_blocks, size), dtype=torch.uint8)
    if form == Format.MXFP4:
        blocks[..., 0] = torch.randint(0, 3, (num_rows, num_blocks)) + 120  # exponents
        return blocks.flatten(1)
    scales = {Format.Q6_K: (208,)}.get(form, (0, 2) if form in (3, 7, 12, 13) else (0,))
    for place in scales:
        halves = torch.rand(num_rows, num_blocks, 1).half() / 10
        blocks[..., place : place + 2] = halves.view(torch.uint8)
    return blocks.flatten(1)


@pytest.mark.parametrize("form", portable_quantised.FORMATS)
def test_weights_are_those_of_gguf(form):
    blocks = random_blocks(form, 3, 512 // BLOCKS[form][0])
    expected = torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType(form)))

    assert torch.equal(portable_quantised.dequantise(blocks, form, 512), expected)


@interpreted
@pytest.mark.parametrize("form", portable_quantised.FORMATS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_triton_multiplies_rows_by_quantised_weights(form, dtype, tolerance, bfloat16_products, monkeypatch):
    """The same sums at every width, with several splits of the inputs, and rows of the weight exactly."""
    from yggdrasil.native import cuda

    monkeypatch.setattr(cuda, "_num_multiprocessors", lambda _: 3)
    num_inputs = 768
    blocks, bias = random_blocks(form, 40, num_inputs // BLOCKS[form][0]), torch.randn(40).to(dtype)
    weight, x = portable_quantised.dequantise(blocks, form, num_inputs), torch.randn(70, num_inputs).to(dtype)
    found = cuda.quantised_linear(x, blocks, bias, 40, form, 1)
    scale, expected = (
        (x.float().abs() @ weight.abs().T).max(),
        torch.nn.functional.linear(x.float(), weight, bias.float()),
    )

    torch.testing.assert_close(found.float() / scale, expected / scale, rtol=0, atol=tolerance)
    for rows in (slice(1), slice(3, 20), slice(5, 40), slice(6, 70)):
        assert torch.equal(cuda.quantised_linear(x[rows], blocks, bias, 40, form, 1), found[rows])
    ids = torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(cuda.quantised_rows(ids, blocks, form, num_inputs, 40, torch.float32), weight[ids])


FEW = (6, 3, 64, 96)  # E, C, H, I


def random_experts(forms, sizes=FEW):
    """Gate, up and down of every expert as blocks [E, N, bytes], biases, and portable experts over their numbers."""
    num_experts, _, hidden, inner = sizes
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    packed = [
        random_blocks(form, num_experts * outputs, inputs // BLOCKS[form][0]).unflatten(0, (num_experts, outputs))
        for form, (outputs, inputs) in zip(forms, shapes, strict=True)
    ]
    biases = [torch.randn(num_experts, outputs) for outputs, _ in shapes]
    gate, up, down = (
        portable_quantised.dequantise(blocks, form, inputs)
        for blocks, form, (_, inputs) in zip(packed, forms, shapes, strict=True)
    )
    return packed, biases, torch.stack([gate, up], 1), down[:, None]


def random_choices(num_rows, sizes=FEW):
    """Rows, and the different experts of each with their shares; a few rows choose less."""
    num_experts, per_row, hidden, _ = sizes
    chosen = torch.rand(num_rows, num_experts).argsort(1)[:, :per_row]
    chosen[1::5, 1:] = num_experts
    return torch.randn(num_rows, hidden), chosen, torch.rand(num_rows, per_row)


MIXES = ((Format.Q4_0, Format.Q4_0, Format.Q8_0), (Format.MXFP4,) * 3)
KINDS = ((0, []), (1, []), (0, [7.0, 1.702]))  # activation and clamp


@pytest.mark.parametrize(("activation", "clamp"), KINDS)
def test_portable_experts_over_blocks_are_those_over_their_numbers(activation, clamp):
    packed, biases, gate_up, down = random_experts(MIXES[0])
    for count in (0, 3):
        given = random_choices(12)
        found = portable_quantised.quantised_experts(*given, packed, MIXES[0], biases[:count], 96, activation, clamp, 1)
        expected = portable.packed_experts(*given, gate_up, down, biases[:count], 96, activation, clamp, 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@interpreted
@pytest.mark.parametrize("forms", MIXES)
@pytest.mark.parametrize(("activation", "clamp"), KINDS)
def test_triton_runs_experts_over_blocks(forms, activation, clamp, monkeypatch, bfloat16_products):
    """The portable sums, and the same bits for a row in any company: rows of an expert share tiles."""
    from yggdrasil.native import cuda

    monkeypatch.setattr(cuda, "_num_multiprocessors", lambda _: 3)
    packed, biases, _, _ = random_experts(forms)
    rows, chosen, shares = random_choices(25)
    for count in (0, 3):
        others = packed, forms, biases[:count], 96, activation, clamp, 1
        found = cuda.quantised_experts(rows, chosen, shares, *others)
        expected = portable_quantised.quantised_experts(rows, chosen, shares, *others)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        for part in (slice(1), slice(1, 2), slice(5, 23)):
            assert torch.equal(cuda.quantised_experts(rows[part], chosen[part], shares[part], *others), found[part])
    same = torch.full_like(chosen[:, :1], 5)
    for chosen_alone in (same, same + 1):  # all rows choose one expert, or none
        given = rows, chosen_alone, shares[:, :1], *others
        torch.testing.assert_close(
            cuda.quantised_experts(*given), portable_quantised.quantised_experts(*given), rtol=1e-4, atol=1e-3
        )


@interpreted
def test_experts_without_a_gate_run_by_triton():
    from yggdrasil.native import cuda

    packed = random_experts(MIXES[0])[0]
    given = *random_choices(9), packed[1:], MIXES[0][1:], [], 96, 2, [], 1
    found, expected = cuda.quantised_experts(*given), portable_quantised.quantised_experts(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_tiles_have_every_pair_of_an_expert_once():
    pytest.importorskip("triton")
    from yggdrasil.native import cuda

    for num_pairs, num_experts in ((1, 4), (7, 3), (200, 5), (64, 64), (300, 1)):
        pairs = torch.randint(0, num_experts + 1, (num_pairs,))
        order, (experts, firsts, ends) = cuda._tiles_of_experts(pairs, num_experts)
        found = []
        for expert, first, end in zip(experts.tolist(), firsts.tolist(), ends.tolist(), strict=True):
            if expert < num_experts:
                tile = order[first : min(first + 16, end)].tolist()
                assert tile
                assert set(pairs[tile].tolist()) == {expert}
                found += tile
        assert sorted(found) == torch.where(pairs < num_experts)[0].tolist()
