"""The native operators against the portable ones, and those against loops over single keys."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from attention_case import AttentionCase

from yggdrasil import native
from yggdrasil.native import portable
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.runner import row_mover

ops = torch.ops.yggdrasil
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
native_only = pytest.mark.skipif(not native.is_native(), reason="no C++ compiler on this machine")
TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 1e-2}}


@DTYPES
@pytest.mark.parametrize("window", [0, 1, 4, 70, -4])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_portable_attention_equals_a_loop_over_keys(dtype, window, softcap):
    """With sinks, one more score of each head whose weight meets no value, and without."""
    for seed in range(6):
        case = AttentionCase(
            seed, dtype, head_dim=8, num_context=[0, 1, 3, 9][seed % 4], width=1 + seed, has_fewer_queries=seed % 2 == 1
        )
        sinks = case.sinks if seed >= 3 else None
        output, keys, values = case.run(portable.tree_attention, window, softcap, sinks=sinks)

        torch.testing.assert_close(output, case.run_slowly(window, softcap, sinks), **TOLERANCE[dtype])
        start = int(case.offsets[1])
        assert torch.equal(keys[:, start : start + case.width], case.key[0])
        assert torch.equal(values[:, start : start + case.width], case.value[0])


@native_only
@DTYPES
@pytest.mark.parametrize("window", [0, 1, 4, 70, -4])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_native_attention_equals_the_portable_one(dtype, window, softcap):
    for seed in range(100, 130):
        case = AttentionCase(seed, dtype, has_fewer_queries=seed % 3 == 0)
        behind = (window, softcap, seed % 4, case.sinks if seed % 2 else None)  # 0 threads: not measured yet
        output, *caches = case.run(ops.tree_attention, *behind)
        expected, *expected_caches = case.run(portable.tree_attention, *behind)

        torch.testing.assert_close(output, expected, **TOLERANCE[dtype])
        for ours, theirs in zip(caches, expected_caches, strict=True):
            assert torch.equal(ours, theirs)


@native_only
@DTYPES
@pytest.mark.parametrize("window", [0, 3, 40, -7])
def test_a_tree_row_is_bit_identical_to_a_plain_step(dtype, window):
    """A row among others, its path scattered over tree slots, gives what it gives alone behind its path."""
    for seed in range(40):
        case = AttentionCase(seed, dtype, num_before=0)
        sinks = case.sinks if seed % 3 == 0 else None
        output, *caches = case.run(ops.tree_attention, window, softcap=[0.0, 2.0][seed % 2], sinks=sinks)
        for row in range(case.width):
            slots = [case.num_context + node for node in case.paths[row]]
            alone = [cache.clone() for cache in caches]
            for cache in alone:
                cache[:, case.num_context : case.num_context + len(slots)] = cache[:, slots].clone()
            before = torch.tensor([case.num_context + len(slots) - 1] * 2)
            inputs = [tensor[:, :, row : row + 1] for tensor in (case.query, case.key, case.value)]
            plain = ops.tree_attention(
                *inputs,
                *alone,
                before,
                torch.ones(1, 1, dtype=torch.bool),
                case.scale,
                window,
                [0.0, 2.0][seed % 2],
                sinks,
                1,
            )
            assert torch.equal(plain[0, 0], output[0, row]), f"{seed = }, {row = }"


@native_only
@pytest.mark.parametrize("group", [1, 3, 5, 7, 16])
@pytest.mark.parametrize("num_context", [0, 30, 64, 101])
def test_rows_are_bit_identical_whatever_rows_are_with_them(group, num_context):
    """Rows of all widths, whose paths share blocks of values in other ways, and units of all threads' shares."""
    for width in [1, 2, 3, 5, 6, 8, 11, 16, 17, 23, 32, 33, 40, 70]:
        case = AttentionCase(
            width, torch.bfloat16, head_dim=[64, 96][width % 2], num_context=num_context, width=width, group=group
        )
        output, *caches = case.run(ops.tree_attention, num_threads=2)
        assert torch.equal(output, case.run(ops.tree_attention, num_threads=3)[0]), f"{width = }"
        start = int(case.offsets[1])
        for row in range(width):
            one = [tensor[:, :, row : row + 1] for tensor in (case.query, case.key, case.value)]
            offsets = torch.tensor([num_context, start + row])
            alone = ops.tree_attention(*one, *caches, offsets, case.mask[row : row + 1], case.scale, 0, 0.0, None, 1)
            assert torch.equal(alone[0, 0], output[0, row]), f"{width = }, {row = }"


@native_only
@pytest.mark.parametrize("group", [1, 3])
def test_rows_of_a_prompt_are_bit_identical_to_plain_steps(group):
    case = AttentionCase(7, torch.bfloat16, head_dim=64, num_context=40, width=150, num_before=0, group=group)
    case.mask[:, : case.width] = torch.ones(case.width, case.width, dtype=torch.bool).tril()
    output, *caches = case.run(ops.tree_attention, num_threads=2)
    for row in range(case.width):
        one = [tensor[:, :, row : row + 1] for tensor in (case.query, case.key, case.value)]
        offsets = torch.tensor([40 + row] * 2)
        plain = ops.tree_attention(
            *one, *caches, offsets, torch.ones(1, 1, dtype=torch.bool), case.scale, 0, 0.0, None, 1
        )
        assert torch.equal(plain[0, 0], output[0, row]), f"{row = }"


@native_only
def test_a_step_that_does_not_fit_the_cache_is_refused():
    case = AttentionCase(0, torch.float32, num_context=9, width=4, num_before=0)
    case.offsets = torch.tensor([9, case.caches[0].shape[1] - 3])
    with pytest.raises(RuntimeError, match="does not fit the cache"):
        case.run(ops.tree_attention)
    case = AttentionCase(0, torch.float32, num_context=9, width=4, num_before=0)
    case.mask = case.mask[:, :3]
    with pytest.raises(RuntimeError, match="outside the tree's slots"):
        case.run(ops.tree_attention)


# ==== packed linear ====

LINEAR_SHAPES = [(1, 2), (15, 6), (16, 64), (17, 30), (33, 128), (97, 50), (64, 62), (130, 258)]  # (N, K)


def pack(weight):
    """Packed into memory that held something else: the padding must be written too."""
    packed = torch.full(ops.packed_shape(weight), 77, dtype=weight.dtype)
    ops.pack_linear(weight, packed)
    return packed


def linear_inputs(seed, num_rows, num_outputs, num_inputs, dtype):
    torch.manual_seed(seed)
    x = torch.randn(1, num_rows, num_inputs).to(dtype)
    weight = (torch.randn(num_outputs, num_inputs) / math.sqrt(num_inputs)).to(dtype)
    return x, weight, torch.randn(num_outputs).to(dtype)


@DTYPES
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_linear_equals_linear(dtype, shape, has_bias):
    for num_rows in range(1, 41):
        x, weight, bias = linear_inputs(num_rows, num_rows, *shape, dtype)
        packed = pack(weight)
        output = ops.packed_linear(x, packed, bias if has_bias else None, shape[0], 1 + num_rows % 2)
        exact = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)

        assert output.shape == (1, num_rows, shape[0])
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), exact, **TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_packing_keeps_every_weight_and_fills_up_with_zeros(dtype, shape):
    """A AMX multiplies what lies behind the last input, and garbage may be no number."""
    _, weight, _ = linear_inputs(0, 1, *shape, dtype)
    packed = pack(weight).flatten()
    padding = torch.zeros(packed.numel() - weight.numel(), dtype=dtype)

    assert torch.equal(packed.sort().values, torch.cat([weight.flatten(), padding]).sort().values)


@native_only
@DTYPES
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_a_packed_row_does_not_depend_on_its_company(dtype, shape):
    x, weight, bias = linear_inputs(0, 40, *shape, dtype)
    packed = pack(weight)
    alone = torch.cat([ops.packed_linear(x[:, i : i + 1], packed, bias, shape[0], 1) for i in range(40)], dim=1)
    for num_rows in range(1, 41):
        for num_threads in (1, 2) if num_rows % 13 == 0 else (1,):
            together = ops.packed_linear(x[:, :num_rows], packed, bias, shape[0], num_threads)
            assert torch.equal(together, alone[:, :num_rows]), f"{num_rows = }, {num_threads = }"


@native_only
@DTYPES
@pytest.mark.parametrize("num_rows", [9, 64, 65, 77])
def test_tiles_of_rows_meet_long_panels_stretch_by_stretch(dtype, num_rows):
    """As one row alone, and as exactly, where sums are put down and taken up again between stretches of a panel."""
    x, weight, _ = linear_inputs(num_rows, num_rows, 131, 1300, dtype)
    packed = pack(weight)
    output = ops.packed_linear(x, packed, None, 131, 2)
    alone = torch.cat([ops.packed_linear(row, packed, None, 131, 1) for row in x.split(1, dim=1)], dim=1)

    assert torch.equal(output, alone)
    torch.testing.assert_close(output.double(), F.linear(x.double(), weight.double()), atol=3e-2, rtol=1e-2)


@native_only
@DTYPES
@pytest.mark.parametrize("num_rows", [1, 8, 12, 77])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_layers_that_are_shared_out_in_pieces_are_whole(dtype, num_rows, num_threads):
    """Several layers of more panels than all rows visit at a time, none a multiple of what meets rows at once."""
    x, first, _ = linear_inputs(1, num_rows, 600, 64, dtype)
    sizes = [600, 131, 333]
    weights = [first, *(linear_inputs(seed, 1, size, 64, dtype)[1] for seed, size in ((2, 131), (3, 333)))]
    packed = [pack(weight) for weight in weights]
    together = ops.packed_linears(x, None, False, None, False, 0.0, None, packed, [None] * 3, sizes, num_threads)
    for output, layer, size in zip(together, packed, sizes, strict=True):
        alone = torch.cat([ops.packed_linear(row, layer, None, size, 1) for row in x.split(1, dim=1)], dim=1)
        assert torch.equal(output, alone)
    best, place = ops.packed_best(x, packed[0], None, 600, num_threads)
    assert torch.equal(place.flatten(), together[0].float().argmax(-1).flatten())
    assert torch.equal(best.flatten(), together[0].amax(-1).flatten())


@DTYPES
def test_packed_linear_reads_strided_rows(dtype):
    x, weight, bias = linear_inputs(3, 6, 17, 30, dtype)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    every_other = torch.stack([x, x], dim=2)[:, :, 0]
    packed = pack(weight)
    expected = ops.packed_linear(x, packed, bias, 17, 1)

    for rows in (strided, every_other):
        torch.testing.assert_close(ops.packed_linear(rows, packed, bias, 17, 1), expected, **TOLERANCE[dtype])


@native_only
def test_packing_refuses_what_it_cannot_hold():
    with pytest.raises(RuntimeError, match="even number of inputs"):
        pack(torch.zeros(4, 3, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="bfloat16 or float32"):
        pack(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="one dtype"):
        ops.packed_linear(torch.zeros(1, 4), pack(torch.zeros(4, 4, dtype=torch.bfloat16)), None, 4, 1)
    with pytest.raises(RuntimeError, match="packed shape"):
        ops.pack_linear(torch.zeros(4, 4), torch.zeros(4, 4))


# ==== commit ====


def moved_by_mail(caches, sources, destination):
    row_mover(StaticCache(caches[:1], caches[1:]))(sources, destination)


@native_only
def test_rows_that_could_not_be_moved_end_the_request():
    cache = StaticCache([torch.zeros(1, 8, 2)], [torch.zeros(1, 8, 2)])
    mover = row_mover(cache)
    mover._move = lambda: -1
    with pytest.raises(RuntimeError, match="could not be moved"):
        mover([3], 2)


MOVES = {"native": ops.move_rows, "portable": portable.move_rows, "mail": moved_by_mail}


@DTYPES
@pytest.mark.parametrize("function", MOVES.values(), ids=MOVES)
def test_rows_move_as_indexing_does(dtype, function):
    rng = random.Random(0)
    for seed in range(40):
        torch.manual_seed(seed)
        capacity = rng.randint(1, 30)
        caches = [torch.randn(rng.randint(1, 3), capacity, size).to(dtype) for size in (4, 4, 7)]
        destination = rng.randrange(capacity)
        count = rng.randint(0, capacity - destination)
        sources = sorted(rng.sample(range(destination, capacity), count))
        expected = [cache.clone() for cache in caches]
        for cache in expected:
            cache[:, destination : destination + count] = cache[:, sources].clone()
        addresses = [cache.data_ptr() for cache in caches]
        function(caches, sources, destination)

        assert [cache.data_ptr() for cache in caches] == addresses
        for ours, theirs in zip(caches, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 63, 64, 200, 1000])
def test_best_tokens_are_the_greatest_and_ties_go_to_the_lower(dtype, size):
    table = (torch.randint(-6, 7, (5, size + 3)) / 2).to(dtype)  # few values, so there are ties
    table[1, :size] = -math.inf
    table[2, size - 1] = math.nan
    logits = table[:, :size]
    best, tokens = torch.ops.yggdrasil.best_tokens(logits, 2)

    for row, value, token in zip(logits, best, tokens, strict=True):
        expected = row.max()
        is_best = row.isnan() if expected.isnan() else row == expected
        assert value.isnan() if expected.isnan() else value == expected
        assert token == is_best.nonzero()[0, 0]


@pytest.mark.parametrize("k", [1, 8, 100, 300])
def test_top_candidates_are_the_greatest_in_order_and_ties_go_to_the_lower(k):
    values = torch.randint(0, 90, (3, 300)).float()
    values[1, 7] = float("-inf")
    best, index = torch.ops.yggdrasil.top_candidates(values, k)
    order = values.sort(dim=-1, descending=True, stable=True)

    assert torch.equal(best, order.values[:, :k])
    assert torch.equal(index, order.indices[:, :k])
