"""Triton kernels, launched by ``cuda.py``.

Grids depend on shapes only, and lengths are read on the device, so a captured launch is valid for any context length;
programs without work return at once.

Dims: W rows of the step, R rows with queries, G query heads per key head, D head size, S cache capacity, T tree slots,
P splits of the keys.
"""

import triton
import triton.language as tl


@triton.jit
def _split_range(
    offsets, width, split, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Return (first, last, number of non-empty splits); the split ``split`` covers slots [first, last).

    Borders depend on the context length alone, not on the width, so that a row's sums have the same order at every
    width. The last split has all remaining slots.
    """
    context = tl.load(offsets).to(tl.int32)
    end = tl.load(offsets + 1).to(tl.int32) + width
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0) // BLOCK_N * BLOCK_N
    size = tl.maximum(tl.cdiv(tl.cdiv(context - begin, BLOCK_N), NUM_SPLITS), 1) * BLOCK_N
    first = begin + split * size
    last = tl.where(split == NUM_SPLITS - 1, end, tl.minimum(first + size, end))
    return first, last, tl.minimum(tl.cdiv(end - begin, size), NUM_SPLITS)


@triton.jit
def _load_rows(cached, new, is_old, is_new, is_kept):
    """Return elements ``cached`` where ``is_old`` and ``new`` where ``is_new``, else 0; copy ``new`` where ``is_kept``.

    No program of the launch reads the elements of ``cached`` that are written.
    """
    fresh = tl.load(new, mask=is_new, other=0.0)
    tl.store(cached, fresh, mask=is_kept)
    return tl.where(is_new, fresh, tl.load(cached, mask=is_old, other=0.0))


@triton.jit
def _scores(queries, keys, scale, SOFTCAP: tl.constexpr):
    """Return the scores of a block of queries and a block of keys, capped if SOFTCAP is positive."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if SOFTCAP > 0:
        scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)  # tanh
    return scores


@triton.jit
def _add_block(scores, values, top, total, mixed):
    """Return each row's maximum score, sum of weights and sum of weighted values after a further block of keys."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # NOTE: the maximum is -inf before a row has seen a key, and -inf - -inf is NaN.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade = tl.exp(top - shift)
    weights = tl.exp(scores - shift[:, None])
    total = total * fade + tl.sum(weights, 1)
    mixed = mixed * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_top, total, mixed


@triton.jit
def attend_to_split(
    query, key, value, key_cache, value_cache, offsets, tree_mask, tree_lengths, partial, stats,
    query_head, query_row, key_head, key_row, value_head, value_row, cache_head, num_tree_slots, width, num_queries,
    scale,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: attend with a block of rows (axis 1) of a key head (axis 0) to one split of the keys (axis 2).

    ``partial`` [Hq * R, P, D] float32 receives unnormalised sums, ``stats`` [Hq * R, P, 2] float32 the maximum score
    and the sum of weights. Splits without keys are not written. ``tree_mask`` is [R, T] uint8; ``tree_lengths`` [R] is
    the number of tree slots that each row sees, read only if WINDOW > 0. ``*_head`` and ``*_row`` are strides in
    elements. GROUP is Hq / Hkv; a key head has GROUP * R rows, R for each of its query heads. ``width`` is W,
    ``num_queries`` is R.

    Keys and values of the step's rows are read from ``key`` and ``value`` [Hkv, W, D]; the first block of rows also
    copies them to the caches' slots from ``offsets[1]`` on.
    """
    head, split = tl.program_id(0), tl.program_id(2)
    first, last, _ = _split_range(offsets, width, split, WINDOW, BLOCK_N, NUM_SPLITS)
    if first >= last:
        return
    context, written = tl.load(offsets).to(tl.int32), tl.load(offsets + 1).to(tl.int32)
    member = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # row of the group: query head * R + row
    is_member = member < GROUP * num_queries
    row = member % num_queries
    query_heads = head * GROUP + member // num_queries
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_DIM
    queries = tl.load(
        query + query_heads[:, None] * query_head + row[:, None] * query_row + columns[None, :],
        mask=is_member[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    lowest = tl.zeros([BLOCK_M], dtype=tl.int32)  # first slot of the context that a row sees
    if WINDOW > 0:
        lowest = context + tl.load(tree_lengths + row).to(tl.int32) - WINDOW
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    key_base, value_base = (
        key_cache + head.to(tl.int64) * cache_head, value_cache + head.to(tl.int64) * cache_head
    )  # fmt: skip
    # Blocks of the context alone are in the caches, and only a window hides some of their slots.
    middle = first + tl.maximum(tl.minimum(context, last) - first, 0) // BLOCK_N * BLOCK_N
    for start in range(first, middle, BLOCK_N):
        slots = start + tl.arange(0, BLOCK_N)
        place = slots[:, None] * HEAD_DIM + columns[None, :]
        keys = tl.load(key_base + place, mask=inside[None, :], other=0.0)
        scores = _scores(queries, keys, scale, SOFTCAP)
        if WINDOW > 0:
            scores = tl.where(slots[None, :] >= lowest[:, None], scores, float("-inf"))
        values = tl.load(value_base + place, mask=inside[None, :], other=0.0)
        top, total, mixed = _add_block(scores, values, top, total, mixed)
    for start in range(middle, last, BLOCK_N):
        slots = start + tl.arange(0, BLOCK_N)
        is_slot = slots < last
        place = slots[:, None] * HEAD_DIM + columns[None, :]
        new = slots - written
        is_old = (is_slot & (new < 0))[:, None] & inside[None, :]
        is_new = (is_slot & (new >= 0))[:, None] & inside[None, :]
        is_kept = is_new & (tl.program_id(1) == 0)
        from_step = key + head * key_head + new[:, None] * key_row + columns[None, :]
        keys = _load_rows(key_base + place, from_step, is_old, is_new, is_kept)
        scores = _scores(queries, keys, scale, SOFTCAP)
        node = slots - context
        is_node = is_slot & (node >= 0) & (node < num_tree_slots)
        allowed = tl.load(
            tree_mask + row[:, None] * num_tree_slots + node[None, :],
            mask=is_member[:, None] & is_node[None, :], other=0,
        )  # fmt: skip
        visible = ((slots < context) & is_slot)[None, :] & (slots[None, :] >= lowest[:, None])
        scores = tl.where(visible | (allowed != 0), scores, float("-inf"))
        from_step = value + head * value_head + new[:, None] * value_row + columns[None, :]
        values = _load_rows(value_base + place, from_step, is_old, is_new, is_kept)
        top, total, mixed = _add_block(scores, values, top, total, mixed)
    out = (query_heads.to(tl.int64) * num_queries + row) * NUM_SPLITS + split
    tl.store(partial + out[:, None] * HEAD_DIM + columns[None, :], mixed, mask=is_member[:, None] & inside[None, :])
    tl.store(stats + out * 2, top, mask=is_member)
    tl.store(stats + out * 2 + 1, total, mask=is_member)


@triton.jit
def merge_splits(
    partial, stats, output, offsets, sinks, width, num_queries,
    WINDOW: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: combine the splits of a row and query head (axis 0: head * R + row) into ``output`` [R, Hq, D].

    ``partial`` and ``stats`` are the outputs of ``attend_to_split``; ``sinks`` [Hq] are read only if HAS_SINKS.
    """
    member = tl.program_id(0)
    _, _, num_used = _split_range(offsets, width, 0, WINDOW, BLOCK_N, NUM_SPLITS)
    splits = tl.arange(0, BLOCK_P)
    is_used = splits < num_used
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_DIM
    place = member.to(tl.int64) * NUM_SPLITS + splits
    top = tl.load(stats + place * 2, mask=is_used, other=float("-inf"))
    total = tl.load(stats + place * 2 + 1, mask=is_used, other=0.0)
    most = tl.max(top, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + member // num_queries).to(tl.float32)
        most = tl.maximum(most, sink)
    weight = tl.exp(top - most)
    whole = tl.sum(total * weight, 0)
    if HAS_SINKS:
        whole += tl.exp(sink - most)
    sums = tl.load(
        partial + place[:, None] * HEAD_DIM + columns[None, :], mask=is_used[:, None] & inside[None, :], other=0.0
    )
    mixed = tl.sum(sums * weight[:, None], 0) / whole
    row, head = member % num_queries, member // num_queries
    out = (row * NUM_HEADS + head).to(tl.int64) * HEAD_DIM + columns
    tl.store(output + out, mixed.to(output.dtype.element_ty), mask=inside)


@triton.jit
def keep_rows(
    caches, start, rows, count, cache_head,
    ELEMENT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Triton kernel: move the KV entries of a pass's accepted rows to consecutive slots from ``start[0]`` on.

    The grid is (buffers, key heads). Pointers to int64: ``caches`` to the addresses of the buffers, [Hkv, S, D] each;
    ``start`` to the slot of the pass's first row; ``rows`` to the indices of the accepted rows in the pass, ascending;
    ``count`` to the number of accepted rows. ``cache_head`` is a head's stride in elements, ELEMENT the Triton type of
    an element's size. No row moves to a later slot, so each row is read before its slot is overwritten.
    """
    buffer = tl.load(caches + tl.program_id(0)).to(tl.pointer_type(ELEMENT))
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_DIM
    first = tl.load(start)
    base = buffer + tl.program_id(1).to(tl.int64) * cache_head + first * HEAD_DIM
    for i in range(0, tl.load(count).to(tl.int32)):
        source = tl.load(rows + i)
        moved = tl.load(base + source * HEAD_DIM + columns, mask=inside)
        tl.store(base + i * HEAD_DIM + columns, moved, mask=inside)
