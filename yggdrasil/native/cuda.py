"""Operators with Triton kernels for CUDA devices, with the signatures of the portable operators.

Importing this module imports Triton.

Dims: W rows of the step, Hq query heads, Hkv key heads, D head size, S cache capacity, T tree slots.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from yggdrasil.native import triton_kernels, triton_quantised
from yggdrasil.native.portable_quantised import weights_per_block

MAX_HEAD_DIM = 256  # larger tiles do not fit the shared memory of every GPU
_MAX_SPLITS = 64
_WAVES = 2  # programs per multiprocessor for which keys, or the inputs of quantised weights, are split
_ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32}  # element size in bytes -> type in which rows are moved
_ROW_BLOCKS = 2  # blocks of rows for which splits of the keys are sized, whatever the width
_STEP, _OUTPUTS = 128, 32  # inputs and outputs of a tile of quantised weights
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
    """Write a pass's keys and values to the cache, and attend, as ``portable.tree_attention``, by flash decoding.

    For ``window`` >= 0 and queries of all W rows, in two launches. The number of splits of the keys, their borders and
    the tiles do not depend on the width: a row has the same bits in all. Scores and sums are float32; weights are
    rounded to the cache's dtype before they multiply the values. The time depends on the context length, not on the
    capacity.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    _, num_heads, width, head_dim = query.shape
    num_key_heads, capacity, _ = key_cache.shape
    group = num_heads // num_key_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Not by the width: the layout of a tile, and so the order of a row's sums, follows from its size.
    block_m = 64 if query.element_size() == 2 else 16
    block_n = 64 if query.element_size() == 2 and block_d <= 128 else 32
    num_warps = 4 if block_d <= 64 else 8  # with 4, rows of 128 values do not fit in registers
    num_row_blocks = triton.cdiv(group * width, block_m)
    num_splits = _num_splits(query.device, _ROW_BLOCKS * num_key_heads, triton.cdiv(capacity, block_n))
    tree_lengths = offsets  # a placeholder: read only if there is a window
    if window > 0:
        later = tree_mask.flip(1).cumsum(1).flip(1)  # visible nodes from this one on
        tree_mask = tree_mask & (later <= window)
        tree_lengths = later[:, 0].contiguous()
    mask = tree_mask.contiguous().view(torch.uint8)
    rows = num_heads * width
    partial = query.new_empty((rows, num_splits, head_dim), dtype=torch.float32)
    stats = query.new_empty((rows, num_splits, 2), dtype=torch.float32)
    output = query.new_empty((1, width, num_heads, head_dim))
    triton_kernels.attend_to_split[(num_key_heads, num_row_blocks, num_splits)](
        query, key, value, key_cache, value_cache, offsets, mask, tree_lengths, partial, stats,
        query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        key_cache.stride(0), mask.shape[1], width, scale,
        WINDOW=window, SOFTCAP=softcap, GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=block_m,
        BLOCK_N=block_n, NUM_SPLITS=num_splits, num_warps=num_warps, num_stages=2,
    )  # fmt: skip
    triton_kernels.merge_splits[(rows,)](
        partial, stats, output, offsets, query if sinks is None else sinks, width, WINDOW=window, NUM_HEADS=num_heads,
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_N=block_n, NUM_SPLITS=num_splits,
        BLOCK_P=triton.next_power_of_2(num_splits), HAS_SINKS=sinks is not None, num_warps=1,
    )  # fmt: skip
    return output


def keep_rows(caches: list[Tensor], start: Tensor, rows: Tensor, count: Tensor) -> None:
    """Move the KV entries of a pass's accepted rows as ``portable.keep_rows`` does, by one launch.

    All ``caches`` are contiguous and have the same shape and dtype.
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
    num_steps, num_blocks = triton.cdiv(num_inputs, _STEP), triton.cdiv(out_features, _OUTPUTS)
    steps_each = triton.cdiv(num_steps, _num_splits(x.device, num_blocks, num_steps))
    num_splits = triton.cdiv(num_steps, steps_each)
    partial = rows.new_empty((num_splits, width, out_features), dtype=torch.float32)
    result = rows.new_empty((width, out_features))
    triton_quantised.multiply[(triton.cdiv(width, 16), num_blocks, num_splits)](
        rows, packed, partial, width, out_features, num_inputs, packed.shape[1], steps_each, **_block(packed, form, x),
        BLOCK_M=16, BLOCK_N=_OUTPUTS, BLOCK_K=_STEP, num_warps=4,
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


def _block(packed: Tensor, form: int, inputs: Tensor) -> dict[str, int]:
    """Return the constants of a format. ``inputs`` [..., K] gives the weight's number of inputs."""
    size = weights_per_block(form)
    return {"FORMAT": form, "BLOCK_INPUTS": size, "BLOCK_BYTES": packed.shape[1] * size // inputs.shape[-1]}


def check() -> None:
    """Raise RuntimeError or OSError if Triton cannot run here: it needs a C compiler and a CUDA driver."""
    triton.runtime.driver.active.get_current_target()


def with_fallback(portable: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return all operators for CUDA devices, name -> function: those of ``portable``, four replaced by Triton kernels.

    ``tree_attention`` and ``keep_rows`` run the function of ``portable`` for calls that their Triton kernels do not
    support: other shapes or dtypes, chunked attention, fewer query than key rows.
    """

    def attend(query: Tensor, key: Tensor, *others: Any) -> Tensor:
        is_served = query.shape[-1] <= MAX_HEAD_DIM and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
        asks_all = query.shape[2] == key.shape[2]  # draft heads with fewer query than key rows are not supported
        is_chunked = others[6] < 0
        operator = tree_attention if is_served and asks_all and not is_chunked else portable["tree_attention"]
        output: Tensor = operator(query, key, *others)
        return output

    def keep(caches: list[Tensor], *others: Tensor) -> None:
        is_served = all(cache.shape == caches[0].shape and cache.is_contiguous() for cache in caches)
        (keep_rows if is_served else portable["keep_rows"])(caches, *others)

    own: dict[str, Callable[..., Any]] = {"quantised_linear": quantised_linear, "quantised_rows": quantised_rows}
    return {**portable, **own, "tree_attention": attend, "keep_rows": keep}


def _num_splits(device: torch.device, num_programs: int, num_blocks: int) -> int:
    """Return the number of splits of the keys that fills the device, a power of two."""
    wanted = triton.next_power_of_2(max(1, _WAVES * _num_multiprocessors(device) // num_programs))
    return int(min(wanted, _MAX_SPLITS, triton.next_power_of_2(num_blocks)))


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _pointer_table(caches: list[Tensor]) -> Tensor:
    """Return the buffers' addresses [n] int64 on the device, cached, since a capture must not copy from the host."""
    addresses = tuple(cache.data_ptr() for cache in caches)
    table = _pointer_tables.get(addresses)
    if table is None:
        table = _pointer_tables[addresses] = torch.tensor(addresses, dtype=torch.int64, device=caches[0].device)
    return table
