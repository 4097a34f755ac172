"""Operators with Triton kernels for CUDA devices, with the signatures of the portable operators.

Importing this module imports Triton.

Dims: W rows of the step, Hq query heads, Hkv key heads, D head size, S cache capacity, T tree slots; for experts: E
experts, C experts per row, H hidden size, I intermediate size, P splits of the inputs.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from yggdrasil.native import triton_kernels, triton_quantised
from yggdrasil.native.portable import activated
from yggdrasil.native.portable_quantised import weights_per_block

MAX_HEAD_DIM = 256  # larger tiles do not fit the shared memory of every GPU
_MAX_SPLITS = 64
_WAVES = 2  # programs per multiprocessor for which keys, or the inputs of quantised weights, are split
_ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32}  # element size in bytes -> type in which rows are moved
_ROW_BLOCKS = 2  # blocks of rows for which splits of the keys are sized, whatever the width
_ROWS, _STEP, _OUTPUTS = 16, 128, 32  # rows, inputs and outputs of a tile of quantised weights
_MOST_TILES = 4  # tiles of rows for which a program dequantises weights once
_TILE = {"BLOCK_M": _ROWS, "BLOCK_N": _OUTPUTS, "BLOCK_K": _STEP, "num_warps": 4}
_pointer_tables: dict[tuple[int, ...], Tensor] = {}


def tree_attention(  # noqa: PLR0913  (an operator's schema)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    offsets: Tensor,
    tree_mask: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    num_threads: int,
) -> Tensor:
    """Write a pass's keys and values to the cache, and attend, as ``portable.tree_attention`` does, by flash decoding.

    ``window`` must be at least 0. Two kernels are launched. The number of splits of the keys, their borders and the
    tiles do not depend on the width, so a row has the same bits at every width. Scores and sums are float32; attention
    weights are rounded to the cache's dtype before they multiply the values. The time depends on the context length,
    not on the capacity.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    _, num_heads, num_queries, head_dim = query.shape
    num_key_heads, capacity, _ = key_cache.shape
    group = num_heads // num_key_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Not by the width: a tile's size determines the tile's layout, and so the order of a row's sums.
    block_m = 64 if query.element_size() == 2 else 16
    block_n = 64 if query.element_size() == 2 and block_d <= 128 else 32
    num_warps = 4 if block_d <= 64 else 8  # with 4, rows of 128 values do not fit in registers
    num_row_blocks = triton.cdiv(group * num_queries, block_m)
    num_splits = _num_splits(query.device, _ROW_BLOCKS * num_key_heads, triton.cdiv(capacity, block_n))
    tree_lengths = offsets  # a placeholder: read only if there is a window
    if window > 0:
        later = tree_mask.flip(1).cumsum(1).flip(1)  # visible nodes from this one on
        tree_mask = tree_mask & (later <= window)
        tree_lengths = later[:, 0].contiguous()
    mask = tree_mask.contiguous().view(torch.uint8)
    rows, width = num_heads * num_queries, key.shape[2]
    partial = query.new_empty((rows, num_splits, head_dim), dtype=torch.float32)
    stats = query.new_empty((rows, num_splits, 2), dtype=torch.float32)
    output = query.new_empty((1, num_queries, num_heads, head_dim))
    triton_kernels.attend_to_split[(num_key_heads, num_row_blocks, num_splits)](
        query, key, value, key_cache, value_cache, offsets, mask, tree_lengths, partial, stats,
        query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        key_cache.stride(0), mask.shape[1], width, num_queries, scale,
        WINDOW=window, SOFTCAP=softcap, GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=block_m,
        BLOCK_N=block_n, NUM_SPLITS=num_splits, num_warps=num_warps, num_stages=2,
    )  # fmt: skip
    triton_kernels.merge_splits[(rows,)](
        partial, stats, output, offsets, query if sinks is None else sinks, width, num_queries, WINDOW=window,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_N=block_n, NUM_SPLITS=num_splits,
        BLOCK_P=triton.next_power_of_2(num_splits), HAS_SINKS=sinks is not None, num_warps=1,
    )  # fmt: skip
    return output


def keep_rows(caches: list[Tensor], start: Tensor, rows: Tensor, count: Tensor) -> None:
    """Move the KV entries of a pass's accepted rows as ``portable.keep_rows`` does, by one kernel launch.

    All ``caches`` must be contiguous, with the same shape and dtype.
    """
    first = caches[0]
    triton_kernels.keep_rows[(len(caches), first.shape[0])](
        _pointer_table(caches), start, rows, count, first.stride(0), ELEMENT=_ELEMENTS[first.element_size()],
        HEAD_DIM=first.shape[2], BLOCK_D=triton.next_power_of_2(first.shape[2]), num_warps=1,
    )  # fmt: skip


def quantised_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, form: int, num_threads: int
) -> Tensor:
    """Multiply ``x`` [..., K] by a quantised weight [N, K] on a GPU, add ``bias`` [N] (or None), and return [..., N].

    ``packed`` [N, bytes] uint8 has the weight's GGUF blocks, of the GGUF type number ``form``. A row has the same bits
    whatever the number of rows. ``out_features`` is N; ``num_threads`` is not used.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    width, num_inputs = rows.shape
    num_blocks, num_splits, steps_each = _split(x.device, out_features, num_inputs)
    partial = rows.new_empty((num_splits, width, out_features), dtype=torch.float32)
    result = rows.new_empty((width, out_features))
    num_tiles = min(triton.next_power_of_2(triton.cdiv(width, _ROWS)), _MOST_TILES)
    triton_quantised.multiply[(triton.cdiv(width, _ROWS * num_tiles), num_blocks, num_splits)](
        rows, packed, partial, width, out_features, num_inputs, packed.shape[1], steps_each, **_block(packed, form, x),
        **_TILE, NUM_TILES=num_tiles,
    )  # fmt: skip
    triton_quantised.add_splits[(triton.cdiv(result.numel(), 1024),)](
        partial, partial if bias is None else bias, result, result.numel(), out_features, num_splits,
        HAS_BIAS=bias is not None, BLOCK=1024,
    )  # fmt: skip
    return result.view(*x.shape[:-1], out_features)


def quantised_rows(ids: Tensor, packed: Tensor, form: int, inputs: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return the rows ``ids`` [...] of a quantised weight, dequantised to [..., ``inputs``] in ``dtype``, on a GPU.

    ``packed`` [N, bytes] uint8 has the weight's GGUF blocks, of the GGUF type number ``form``; ``num_rows`` is unused.
    """
    result = ids.new_empty((*ids.shape, inputs), dtype=dtype)
    triton_quantised.read_rows[(ids.numel(), triton.cdiv(inputs, 512))](
        ids.contiguous(), packed, result, inputs, packed.shape[1], **_block(packed, form, result), BLOCK_K=512
    )
    return result


def quantised_experts(  # noqa: PLR0913  (an operator's schema)
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    packed: Sequence[Tensor],
    forms: Sequence[int],
    biases: Sequence[Tensor],
    inner_features: int,
    activation: int,
    clamp: Sequence[float],
    num_threads: int,
) -> Tensor:
    """Return the weighted sums [W, H] of the outputs of each row's experts, as ``portable_quantised`` does, on a GPU.

    Weights are dequantised in registers. A row has the same bits at every width: all tiles have one size, each tile has
    rows of one expert, and the outputs of a row's experts are added in the order of ``chosen``.
    """
    width, per_row = chosen.shape
    num_experts, num_pairs = packed[0].shape[0], chosen.numel()
    pairs = chosen.flatten()
    order, tiles = _tiles_of_experts(pairs, num_experts)

    def multiplied(part: int, rows: Tensor) -> Tensor:
        """Return the sums [P, W * C, N] of splits, of ``rows`` [W or W * C, K]."""
        blocks, num_inputs = packed[part], rows.shape[1]
        num_outputs, row_bytes = blocks.shape[1:]
        num_blocks, num_splits, steps_each = _split(x.device, num_outputs, num_inputs, per_row)
        partial = rows.new_empty((num_splits, num_pairs, num_outputs), dtype=torch.float32)
        triton_quantised.multiply_experts[(tiles.shape[1], num_blocks, num_splits)](
            rows, order, tiles, blocks, partial, num_pairs, num_experts, tiles.shape[1], num_outputs, num_inputs,
            row_bytes, steps_each, num_pairs // rows.shape[0], **_block(blocks, forms[part], rows), **_TILE,
        )  # fmt: skip
        return partial

    def inner(part: int) -> Tensor:  # [W * C, I]
        partial = multiplied(part, rows)
        sums = partial.new_empty(partial.shape[1:])
        triton_quantised.add_splits[(triton.cdiv(sums.numel(), 1024),)](
            partial, partial, sums, sums.numel(), sums.shape[1], len(partial), HAS_BIAS=False, BLOCK=1024
        )
        return (sums + biases[part][pairs.clamp(max=num_experts - 1)] if biases else sums).to(x.dtype)

    rows = x.contiguous()
    firsts = [inner(part) for part in range(len(packed) - 1)]
    partial = multiplied(len(packed) - 1, activated(firsts[0], firsts[-1], activation, clamp).contiguous())
    result = torch.empty_like(rows)
    num_outputs = result.shape[1]
    triton_quantised.add_experts[(width, triton.cdiv(num_outputs, 512))](
        partial, chosen.contiguous(), shares.contiguous(), biases[-1] if biases else partial, result, num_pairs,
        num_experts, num_outputs, len(partial), PER_ROW=per_row, HAS_BIAS=bool(biases), BLOCK=512,
    )  # fmt: skip
    return result


def _tiles_of_experts(pairs: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Group pairs of a row and an expert into tiles of at most 16 pairs of one expert, without waiting for the device.

    Args:
        pairs: [W * C] int64, the expert of each pair; E for no expert.

    Returns:
        (Indices of the pairs sorted by expert, [W * C] int64, and [3, tiles] int64: each tile's expert, or E if the
            tile has no pairs, and the first and the end, excluded, of its pairs among the sorted ones.) The number of
            tiles depends on the shapes alone.
    """
    num_tiles = min(pairs.numel(), num_experts + pairs.numel() // _ROWS)
    counts = pairs.new_zeros(num_experts + 1).scatter_add_(0, pairs, torch.ones_like(pairs))
    ends = counts.cumsum(0)
    counts[num_experts:] = 0  # pairs of no expert
    tile_counts = (counts + _ROWS - 1) // _ROWS
    tile_ends = tile_counts.cumsum(0)
    tile = torch.arange(num_tiles, device=pairs.device)
    expert = torch.searchsorted(tile_ends[:-1], tile, right=True)
    first = (ends - counts)[expert] + (tile - (tile_ends - tile_counts)[expert]) * _ROWS
    return pairs.argsort(stable=True), torch.stack([expert, first, ends[expert]])


def _split(device: torch.device, num_outputs: int, num_inputs: int, num_tiles: int = 1) -> tuple[int, int, int]:
    """Return how products with a quantised weight [N, K] are divided among programs, whatever the width.

    Args:
        num_tiles: number of tiles of rows in the narrowest pass.

    Returns:
        The number of blocks of outputs, the number of splits of the inputs, and the steps of inputs of a split.
    """
    num_steps, num_blocks = triton.cdiv(num_inputs, _STEP), triton.cdiv(num_outputs, _OUTPUTS)
    steps_each = triton.cdiv(num_steps, _num_splits(device, num_blocks * num_tiles, num_steps))
    return num_blocks, triton.cdiv(num_steps, steps_each), steps_each


def _block(packed: Tensor, form: int, inputs: Tensor) -> dict[str, int]:
    """Return the constants of a format. ``inputs`` [..., K] gives the weight's number of inputs."""
    size = weights_per_block(form)
    return {"FORMAT": form, "BLOCK_INPUTS": size, "BLOCK_BYTES": packed.shape[-1] * size // inputs.shape[-1]}


def check() -> None:
    """Raise RuntimeError or OSError if Triton cannot run here; Triton needs a C compiler and a CUDA driver."""
    triton.runtime.driver.active.get_current_target()


def with_fallback(portable: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the operators of ``portable``, name -> function, with five of them replaced by Triton kernels.

    ``tree_attention`` and ``keep_rows`` run the function of ``portable`` for calls that their Triton kernels do not
    support: other shapes or dtypes, chunked attention.
    """

    def attend(query: Tensor, key: Tensor, *others: Any) -> Tensor:
        is_served = query.shape[-1] <= MAX_HEAD_DIM and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
        is_chunked = others[6] < 0
        operator = tree_attention if is_served and not is_chunked else portable["tree_attention"]
        output: Tensor = operator(query, key, *others)
        return output

    def keep(caches: list[Tensor], *others: Tensor) -> None:
        is_served = all(cache.shape == caches[0].shape and cache.is_contiguous() for cache in caches)
        (keep_rows if is_served else portable["keep_rows"])(caches, *others)

    own: dict[str, Callable[..., Any]] = {
        each.__name__: each for each in (quantised_linear, quantised_rows, quantised_experts)
    }
    return {**portable, **own, "tree_attention": attend, "keep_rows": keep}


def _num_splits(device: torch.device, num_programs: int, num_blocks: int) -> int:
    """Return the number of splits, a power of two up to 64, for which ``num_programs`` programs fill the device."""
    wanted = triton.next_power_of_2(max(1, _WAVES * _num_multiprocessors(device) // num_programs))
    return int(min(wanted, _MAX_SPLITS, triton.next_power_of_2(num_blocks)))


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _pointer_table(caches: list[Tensor]) -> Tensor:
    """Return the addresses [n] int64 of ``caches`` on the device, cached: a capture must not copy from the host."""
    addresses = tuple(cache.data_ptr() for cache in caches)
    table = _pointer_tables.get(addresses)
    if table is None:
        table = _pointer_tables[addresses] = torch.tensor(addresses, dtype=torch.int64, device=caches[0].device)
    return table
