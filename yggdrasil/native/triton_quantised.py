"""Triton kernels over quantised weights in GGUF's layout, launched by ``cuda.py``.

Weights are dequantised in registers. The order in which the inputs of a row are summed depends on the weight's shape
and the device, not on the width, so a row has the same bits at every width.

Dims: W rows of the step, N outputs, K inputs, P splits of the inputs; E experts, C experts per row.
"""

import triton
import triton.language as tl

Q4_0, Q4_1, Q5_0, Q5_1 = tl.constexpr(2), tl.constexpr(3), tl.constexpr(6), tl.constexpr(7)
Q8_0, Q4_K, Q5_K, Q6_K = tl.constexpr(8), tl.constexpr(12), tl.constexpr(13), tl.constexpr(14)
MXFP4 = tl.constexpr(39)


@triton.jit
def _byte(place, inside):
    return tl.load(place, mask=inside, other=0).to(tl.int32)


@triton.jit
def _half(place, inside):
    """Return the float16 number at ``place``, which is 2-byte aligned, as float32."""
    return tl.load(place.to(tl.pointer_type(tl.float16)), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _of_32(block, at, inside, FORMAT: tl.constexpr):
    """Return the weights ``at`` (0 to 31) of blocks of 32 weights."""
    if FORMAT == MXFP4:
        code = (_byte(block + 1 + at % 16, inside) >> (at // 16 * 4)) & 15
        exponent, bit = (code >> 1) & 3, code & 1
        value = tl.where(exponent == 0, bit, (2 + bit) << tl.maximum(exponent - 1, 0)).to(tl.float32)  # doubled
        return tl.where(code > 7, -value, value) * _half_power(_byte(block + 0 * at, inside))
    scale = _half(block, inside)
    if FORMAT == Q8_0:
        return _signed(_byte(block + 2 + at, inside)).to(tl.float32) * scale
    has_least: tl.constexpr = FORMAT == Q4_1 or FORMAT == Q5_1
    has_high: tl.constexpr = FORMAT == Q5_0 or FORMAT == Q5_1
    first: tl.constexpr = (4 if has_least else 2) + (4 if has_high else 0)
    value = (_byte(block + first + at % 16, inside) >> (at // 16 * 4)) & 15
    if has_high:
        value |= ((_byte(block + first - 4 + at // 8, inside) >> (at % 8)) & 1) << 4
    if has_least:
        return value.to(tl.float32) * scale + _half(block + 2, inside)
    return (value - (16 if has_high else 8)).to(tl.float32) * scale


@triton.jit
def _half_power(exponent):
    """Return 2 ** (exponent - 128), exactly, in float32; ``exponent`` is between 0 and 255."""
    return tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _signed(byte):
    return tl.where(byte > 127, byte - 256, byte)


@triton.jit
def _of_256(block, at, inside, FORMAT: tl.constexpr):
    """Return the weights ``at`` (0 to 255) of blocks of 256 weights."""
    if FORMAT == Q6_K:
        half, rest = at // 128, at % 128
        low = (_byte(block + half * 64 + rest % 64, inside) >> (rest // 64 * 4)) & 15
        high = (_byte(block + 128 + half * 32 + rest % 32, inside) >> (rest // 32 * 2)) & 3
        scale = _half(block + 208, inside) * _signed(_byte(block + 192 + at // 16, inside)).to(tl.float32)
        return scale * ((low | (high << 4)) - 32).to(tl.float32)
    part = at // 32
    other = tl.where(part < 4, part + 4, part - 4)  # packed with this part
    # The scales' bytes: parts 0 to 3 and their minima have 6 bits each, the others 4 there and 2 above those 6.
    own, same = _byte(block + 4 + part, inside), _byte(block + 4 + other, inside)
    mixed = _byte(block + 8 + part, inside & (part >= 4))
    scale = tl.where(part < 4, own & 63, (mixed & 15) | ((same >> 2) & 48))
    least = tl.where(part < 4, same & 63, (mixed >> 4) | ((own >> 2) & 48))
    first: tl.constexpr = 48 if FORMAT == Q5_K else 16
    value = (_byte(block + first + at // 64 * 32 + at % 32, inside) >> (part % 2 * 4)) & 15
    if FORMAT == Q5_K:
        value |= ((_byte(block + 16 + at % 32, inside) >> part) & 1) << 4
    shift = _half(block + 2, inside) * least.to(tl.float32)
    return _half(block, inside) * scale.to(tl.float32) * value.to(tl.float32) - shift


@triton.jit
def _weights(
    rows, at, inside, FORMAT: tl.constexpr, BLOCK_INPUTS: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Return the weights, float32, of the rows of blocks at the addresses ``rows``, at the input indices ``at``."""
    block = rows + at // BLOCK_INPUTS * BLOCK_BYTES
    if BLOCK_INPUTS == 32:
        return _of_32(block, at % 32, inside, FORMAT)
    return _of_256(block, at % 256, inside, FORMAT)


@triton.jit
def multiply(
    inputs, blocks, partial, width, num_outputs, num_inputs, row_bytes, steps_each,
    FORMAT: tl.constexpr, BLOCK_INPUTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """Triton kernel: multiply NUM_TILES tiles of rows (axis 0) by a block of outputs (axis 1) over a split (axis 2).

    ``inputs`` [W, K]; ``blocks`` [N, ``row_bytes``] uint8; ``partial`` [P, W, N] float32 receives the sums. A split is
    ``steps_each`` * BLOCK_K inputs. Tiles always have BLOCK_M rows, since tiles of another size may sum in another
    order. The tiles of a program share the dequantised weights. NUM_TILES is 1, 2 or 4. A GGUF block of type number
    FORMAT has BLOCK_INPUTS weights in BLOCK_BYTES bytes.
    """
    row = tl.program_id(0) * NUM_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    _multiply_rows(
        inputs, row, row, row < width, blocks, partial, width, num_outputs, num_inputs, row_bytes, steps_each,
        FORMAT, BLOCK_INPUTS, BLOCK_BYTES, BLOCK_M, BLOCK_N, BLOCK_K, NUM_TILES,
    )  # fmt: skip


@triton.jit
def _multiply_rows(
    inputs, source, row, is_row, blocks, partial, width, num_outputs, num_inputs, row_bytes, steps_each,
    FORMAT: tl.constexpr, BLOCK_INPUTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """Multiply rows ``source`` of ``inputs``, and store the sums in rows ``row`` of ``partial``, as for ``multiply``.

    ``source`` and ``row`` are [BLOCK_M]; where ``is_row`` is false, nothing is read or stored. Further tiles have the
    next rows.
    """
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < num_outputs
    rows = blocks + output.to(tl.int64)[:, None] * row_bytes
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    second, third, fourth = total, total, total
    first = tl.program_id(2) * steps_each * BLOCK_K
    for start in range(first, tl.minimum(first + steps_each * BLOCK_K, num_inputs), BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        is_input = (at < num_inputs)[None, :]
        weights = _weights(rows, at[None, :], is_output[:, None] & is_input, FORMAT, BLOCK_INPUTS, BLOCK_BYTES)
        weights = tl.trans(weights.to(inputs.dtype.element_ty))
        place = inputs + source[:, None] * num_inputs + at[None, :]
        total = _added(total, place, is_row[:, None] & is_input, weights)
        if NUM_TILES > 1:
            place += BLOCK_M * num_inputs
            second = _added(second, place, (row + BLOCK_M < width)[:, None] & is_input, weights)
        if NUM_TILES > 2:
            place += BLOCK_M * num_inputs
            third = _added(third, place, (row + 2 * BLOCK_M < width)[:, None] & is_input, weights)
            place += BLOCK_M * num_inputs
            fourth = _added(fourth, place, (row + 3 * BLOCK_M < width)[:, None] & is_input, weights)
    place = partial + (tl.program_id(2).to(tl.int64) * width + row)[:, None] * num_outputs + output[None, :]
    tl.store(place, total, mask=is_row[:, None] & is_output[None, :])
    if NUM_TILES > 1:
        is_stored = (row + BLOCK_M < width)[:, None] & is_output[None, :]
        tl.store(place + BLOCK_M * num_outputs, second, mask=is_stored)
    if NUM_TILES > 2:
        is_stored = (row + 2 * BLOCK_M < width)[:, None] & is_output[None, :]
        tl.store(place + 2 * BLOCK_M * num_outputs, third, mask=is_stored)
        is_stored = (row + 3 * BLOCK_M < width)[:, None] & is_output[None, :]
        tl.store(place + 3 * BLOCK_M * num_outputs, fourth, mask=is_stored)


@triton.jit
def _added(total, place, inside, weights):
    """Return ``total`` plus the products of the rows at ``place`` with ``weights`` [BLOCK_K, BLOCK_N]."""
    rows = tl.load(place, mask=inside, other=0.0)
    return total + tl.dot(rows, weights, input_precision="ieee")


@triton.jit
def multiply_experts(
    inputs, order, tiles, blocks, partial, num_pairs, num_experts, num_tiles, num_outputs, num_inputs, row_bytes,
    steps_each, per_row,
    FORMAT: tl.constexpr, BLOCK_INPUTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Triton kernel: for each (row, expert) pair, multiply the row by the expert's weight, as ``multiply`` does.

    Program i of axis 0 multiplies tile i: at most BLOCK_M pairs of one expert. Pair p has row p // C. For pairs in no
    tile, nothing is written.

    Args:
        inputs: [W, K] with ``per_row`` = C, or a row for each pair, [W * C, K] with ``per_row`` = 1.
        order: [W * C] int64, the pairs sorted by expert.
        tiles: [3, ``num_tiles``] int64: each tile's expert, or E if the tile has no pairs, and the first and the end
            (excluded) of the tile's pairs in ``order``.
        blocks: [E, N, ``row_bytes``] uint8.
        partial: [P, W * C, N] float32, receives the sums.
    """
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile)
    if expert < num_experts:
        at = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_M)
        is_pair = at < tl.load(tiles + 2 * num_tiles + tile)
        pair = tl.load(order + at, mask=is_pair, other=0)
        _multiply_rows(
            inputs, pair // per_row, pair, is_pair, blocks + expert * num_outputs * row_bytes, partial, num_pairs,
            num_outputs, num_inputs, row_bytes, steps_each,
            FORMAT, BLOCK_INPUTS, BLOCK_BYTES, BLOCK_M, BLOCK_N, BLOCK_K, 1,
        )  # fmt: skip


@triton.jit
def add_experts(
    partial, chosen, shares, bias, result, num_pairs, num_experts, num_outputs, num_splits,
    PER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Triton kernel: sum each pair's splits, add its expert's bias, and sum a row's pairs weighted by their shares.

    The grid is (W, blocks of BLOCK outputs). ``partial`` [P, W * C, N] float32; ``chosen`` [W, C] int64, E for no
    expert; ``shares`` [W, C] weights of the pairs; ``bias`` [E, N]; ``result`` [W, N]. C is PER_ROW.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_outputs
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(PER_ROW):
        pair = row * PER_ROW + number
        expert = tl.load(chosen + pair)
        if expert < num_experts:
            sums = tl.zeros([BLOCK], dtype=tl.float32)
            for split in range(0, num_splits):
                sums += tl.load(partial + (split * num_pairs + pair) * num_outputs + at, mask=inside, other=0.0)
            if HAS_BIAS:
                sums += tl.load(bias + expert * num_outputs + at, mask=inside, other=0.0).to(tl.float32)
            total += sums.to(result.dtype.element_ty).to(tl.float32) * tl.load(shares + pair).to(tl.float32)
    tl.store(result + row * num_outputs + at, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def add_splits(
    partial, bias, result, size, num_outputs, num_splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Triton kernel: add the splits of ``partial`` [P, size] in order, and the bias if HAS_BIAS, to ``result`` [size].

    Program i adds elements i * BLOCK to (i + 1) * BLOCK - 1. Element e belongs to output e modulo ``num_outputs``.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(0, num_splits):
        total += tl.load(partial + split * size + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + at, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def read_rows(
    ids, blocks, result, num_inputs, row_bytes,
    FORMAT: tl.constexpr, BLOCK_INPUTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Triton kernel: write row ``ids[i]`` of a weight, dequantised, to row i of ``result`` [n, K].

    The grid is (n, blocks of BLOCK_K inputs). ``blocks`` [N, ``row_bytes``] uint8 are the weight's GGUF blocks, of type
    number FORMAT with BLOCK_INPUTS weights in BLOCK_BYTES bytes.
    """
    number = tl.program_id(0)
    at = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = at < num_inputs
    rows = blocks + tl.load(ids + number) * row_bytes
    weights = _weights(rows, at, inside, FORMAT, BLOCK_INPUTS, BLOCK_BYTES)
    tl.store(result + number.to(tl.int64) * num_inputs + at, weights.to(result.dtype.element_ty), mask=inside)
