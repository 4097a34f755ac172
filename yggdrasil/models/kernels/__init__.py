"""The operators of a static-shape step, as ``torch.ops.yggdrasil``.

Each operator has a schema, a shape function and a portable implementation in PyTorch (any device). On CPUs a native
implementation is compiled once a machine from ``ops.cpp`` and takes the portable one's place; where no compiler is
found the portable one stays, slower and otherwise equal. On CUDA devices ``cuda.py`` does the same with Triton. Those
over quantised weights are native only: elsewhere models are loaded with full weights.

Dims: W rows of the step, Hq query heads, Hkv key heads, D head size, S cache capacity, T tree slots.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .build import load_native

__all__ = ["is_native"]

_library = torch.library.Library("yggdrasil", "DEF")
_library.define("packed_shape(Tensor weight) -> int[]")
_library.define("pack_linear(Tensor weight, Tensor(a!) packed) -> ()")
_library.define("packed_linear(Tensor input, Tensor packed, Tensor? bias, int out_features, int num_threads) -> Tensor")
_AROUND = "Tensor? gate, Tensor? norm, float eps, Tensor? residual"  # what linears do beside multiplying
_library.define(
    f"packed_linears(Tensor input, {_AROUND}, Tensor[] packed, Tensor?[] biases, int[] out_features, int num_threads) "
    "-> Tensor[]"
)
_library.define(
    "packed_best(Tensor input, Tensor packed, Tensor? bias, int out_features, int num_threads) -> (Tensor, Tensor)"
)
_library.define(
    "quantised_best(Tensor input, Tensor packed, Tensor? bias, int out_features, int format, int num_threads) "
    "-> (Tensor, Tensor)"
)
_library.define("quantised_shape(Tensor rows, int format, int inputs) -> int[]")
_library.define("pack_quantised(Tensor rows, int format, int inputs, Tensor(a!) packed) -> ()")
_library.define(
    "quantised_linear(Tensor input, Tensor packed, Tensor? bias, int out_features, int format, int num_threads) "
    "-> Tensor"
)
_library.define(
    f"quantised_linears(Tensor input, {_AROUND}, Tensor[] packed, Tensor?[] biases, int[] out_features, int[] formats, "
    "int num_threads) -> Tensor[]"
)
_library.define(
    "quantised_rows(Tensor ids, Tensor packed, int format, int inputs, int num_rows, ScalarType dtype) -> Tensor"
)
_library.define(
    "tree_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor offsets, Tensor tree_mask, float scale, int window, float softcap, int num_threads) -> Tensor"
)
_library.define("best_tokens(Tensor logits, int num_threads) -> (Tensor, Tensor)")
_library.define("top_candidates(Tensor values, SymInt k) -> (Tensor, Tensor)")
_library.define("open_unit(str name, str path) -> ()")
_library.define("keep_table(Tensor[] tensors) -> int")
_library.define("drop_table(int number) -> ()")
_library.define("run_units(str name, Tensor table, Tensor carried, Tensor[] shared, int[] places, int count) -> Tensor")
_library.define("move_rows(Tensor(a!)[] caches, int[] sources, int destination) -> ()")
_library.define("keep_rows(Tensor(a!)[] caches, Tensor start, Tensor rows, Tensor count) -> ()")
_library.define("rank_nodes(Tensor scores, Tensor(a!) order, Tensor(b!) expected) -> ()")
_library.define("read_words(Tensor buffer, int num_threads) -> int")


def _packed_shape(weight: Tensor) -> list[int]:
    return list(weight.shape)


def _pack_linear(weight: Tensor, packed: Tensor) -> None:
    packed.copy_(weight)


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, num_threads: int) -> Tensor:
    return torch.nn.functional.linear(x, packed, bias)


def _packed_linears(  # noqa: PLR0913  (an operator's schema)
    x: Tensor,  # [..., K]
    gate: Tensor | None,  # [..., K]: the layers read silu(gate) * x
    norm: Tensor | None,  # [K]: they read norm * (x / its root mean square)
    eps: float,  # added to the mean square
    residual: Tensor | None,  # [..., N]: added to what the one layer gives
    packed: list[Tensor],
    biases: list[Tensor | None],
    out_features: list[int],
    num_threads: int,
) -> list[Tensor]:
    """Linear layers over one input, and what stands around them; each operation is rounded to the dtype of ``x``."""
    if norm is not None:
        whole = x.float()
        x = norm * (whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    if gate is not None:
        x = torch.nn.functional.silu(gate) * x
    outputs = [torch.nn.functional.linear(x, weight, bias) for weight, bias in zip(packed, biases, strict=True)]
    return outputs if residual is None else [outputs[0] + residual]


def _packed_best(
    x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, num_threads: int
) -> tuple[Tensor, Tensor]:
    """The greatest output of each row, not-a-number before all, and its place, the lowest of a tie."""
    return _best_tokens(torch.nn.functional.linear(x, packed, bias).flatten(0, -2), num_threads)


def _tree_attention(  # noqa: PLR0913  (an operator's schema)
    query: Tensor,  # [1, Hq, W, D]
    key: Tensor,  # [1, Hkv, W, D]
    value: Tensor,
    key_cache: Tensor,  # [Hkv, S, D]
    value_cache: Tensor,
    offsets: Tensor,  # [2] int64: context length, first slot written
    tree_mask: Tensor,  # [W, T] bool over the slots from the context length on
    scale: float,
    window: int,
    softcap: float,
    num_threads: int,
) -> Tensor:
    """Write the step's keys and values, then attend to the context and to the tree slots the mask allows.

    Returns [1, W, Hq, D]. ``window`` > 0 keeps the last ``window`` keys of each row's path (itself included);
    ``softcap`` > 0 bounds the scores as Gemma 2 does. A grouped matmul serves all query heads of a key head, so keys
    are never repeated.
    """
    context, start = offsets.unbind()
    width, num_key_heads, capacity = query.shape[2], key_cache.shape[0], key_cache.shape[1]
    rows = start + torch.arange(width, device=query.device)
    key_cache.index_copy_(1, rows, key[0])
    value_cache.index_copy_(1, rows, value[0])
    slots = torch.arange(capacity, device=query.device)
    tree_slots = slots - context  # [S]
    inside = (tree_slots >= 0) & (tree_slots < tree_mask.shape[1])
    visible = (slots < context) | (inside & tree_mask[:, tree_slots.clamp(0, tree_mask.shape[1] - 1)])  # [W, S]
    if window > 0:
        later = visible.flip(1).cumsum(1).flip(1)  # visible keys from this one on; a path's keys ascend in position
        visible = visible & (later <= window)
    grouped = query[0].reshape(num_key_heads, -1, query.shape[-1]).float()  # [Hkv, G*W, D]
    scores = grouped @ key_cache.float().transpose(1, 2) * scale  # [Hkv, G*W, S]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(num_key_heads, -1, width, capacity).masked_fill(~visible, float("-inf"))
    mixed = scores.softmax(-1).view(num_key_heads, -1, capacity) @ value_cache.float()
    heads = mixed.view(-1, width, query.shape[-1])  # [Hq, W, D]
    return heads.transpose(0, 1).to(query.dtype).unsqueeze(0).contiguous()


def _best_tokens(logits: Tensor, num_threads: int) -> tuple[Tensor, Tensor]:
    best, place = logits.max(-1)
    return best, place


def _top_candidates(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, index = values.topk(k, dim=-1)
    return best, index


def _move_rows(caches: list[Tensor], sources: list[int], destination: int) -> None:
    for cache in caches:
        cache[:, destination : destination + len(sources)] = cache[:, sources]


def _rank_nodes(scores: Tensor, order: Tensor, expected: Tensor) -> None:
    best, nodes = scores.sort(descending=True, stable=True)
    order.copy_(nodes)
    expected.copy_(best.exp().cumsum(0))


def _read_words(buffer: Tensor, num_threads: int) -> int:
    return int(buffer.view(torch.int64).sum())


def _keep_rows(
    caches: list[Tensor],  # each [Hkv, S, D]
    start: Tensor,  # [1] int64, first slot of the step
    rows: Tensor,  # [W] int64, ascending; the first ``count`` are accepted
    count: Tensor,  # [1] int64
) -> None:
    """Move accepted rows to the slots from ``start`` on, lengths unknown to the host: the rest move onto themselves."""
    places = torch.arange(rows.numel(), device=rows.device)
    sources = start + torch.where(places < count, rows, places)
    for cache in caches:
        cache.index_copy_(1, start + places, cache.index_select(1, sources))


def _packed_linear_shape(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, num_threads: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _quantised_linear_shape(
    x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, form: int, num_threads: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _quantised_linears_shape(  # noqa: PLR0913
    x: Tensor, gate: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None, packed: list[Tensor],
    biases: list[Tensor | None], out_features: list[int], formats: list[int], num_threads: int,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty((*x.shape[:-1], size)) for size in out_features]


def _quantised_rows_shape(
    ids: Tensor, packed: Tensor, form: int, inputs: int, num_rows: int, dtype: torch.dtype
) -> Tensor:
    return ids.new_empty((*ids.shape, inputs), dtype=dtype)


def _packed_linears_shape(  # noqa: PLR0913
    x: Tensor, gate: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None, packed: list[Tensor],
    biases: list[Tensor | None], out_features: list[int], num_threads: int,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty((*x.shape[:-1], size)) for size in out_features]


def _best_tokens_shape(logits: Tensor, num_threads: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0],)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def _packed_best_shape(
    x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, num_threads: int
) -> tuple[Tensor, Tensor]:
    return _best_tokens_shape(x.flatten(0, -2), num_threads)


def _quantised_best_shape(
    x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, form: int, num_threads: int
) -> tuple[Tensor, Tensor]:
    return _best_tokens_shape(x.flatten(0, -2), num_threads)


def _top_candidates_shape(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (values.shape[0], k)
    return values.new_empty(shape), values.new_empty(shape, dtype=torch.int64)


def _tree_attention_shape(  # noqa: PLR0913
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, offsets: Tensor,
    tree_mask: Tensor, scale: float, window: int, softcap: float, num_threads: int,
) -> Tensor:  # fmt: skip
    return query.new_empty((1, query.shape[2], query.shape[1], query.shape[3]))


def _run_units_shape(
    name: str, table: Tensor, carried: Tensor, shared: list[Tensor], places: list[int], count: int
) -> Tensor:
    return torch.empty_like(carried)


_portable: dict[str, Callable[..., Any]] = {
    "packed_shape": _packed_shape,
    "pack_linear": _pack_linear,
    "packed_linear": _packed_linear,
    "packed_linears": _packed_linears,
    "packed_best": _packed_best,
    "tree_attention": _tree_attention,
    "best_tokens": _best_tokens,
    "top_candidates": _top_candidates,
    "move_rows": _move_rows,
    "rank_nodes": _rank_nodes,
    "read_words": _read_words,
}


@lru_cache(1)
def cuda_operators() -> dict[str, Callable[..., Any]]:
    """Implementations on CUDA devices: Triton kernels where Triton is installed, else the portable ones."""
    functions = {**_portable, "keep_rows": _keep_rows}
    try:
        from . import cuda

        cuda.check()
    except (ImportError, RuntimeError, OSError) as error:
        print(f"yggdrasil: no Triton, so attention on the GPU is slower ({error})", file=sys.stderr)  # noqa: T201
        return functions
    return cuda.with_fallback(functions)


def _on_cuda(name: str) -> Callable[..., Any]:
    """The CUDA operator ``name``, looked up when first called: a CPU never imports Triton."""
    return lambda *arguments: cuda_operators()[name](*arguments)


for _name in (*_portable, "keep_rows"):
    _library.impl(_name, _on_cuda(_name), "CUDA")
_library.impl("keep_rows", _keep_rows, "CPU")
torch.library.register_fake("yggdrasil::packed_linear", _packed_linear_shape, lib=_library)
torch.library.register_fake("yggdrasil::quantised_linear", _quantised_linear_shape, lib=_library)
torch.library.register_fake("yggdrasil::quantised_linears", _quantised_linears_shape, lib=_library)
torch.library.register_fake("yggdrasil::quantised_rows", _quantised_rows_shape, lib=_library)
torch.library.register_fake("yggdrasil::packed_linears", _packed_linears_shape, lib=_library)
torch.library.register_fake("yggdrasil::packed_best", _packed_best_shape, lib=_library)
torch.library.register_fake("yggdrasil::quantised_best", _quantised_best_shape, lib=_library)
torch.library.register_fake("yggdrasil::best_tokens", _best_tokens_shape, lib=_library)
torch.library.register_fake("yggdrasil::top_candidates", _top_candidates_shape, lib=_library)
torch.library.register_fake("yggdrasil::tree_attention", _tree_attention_shape, lib=_library)
torch.library.register_fake("yggdrasil::run_units", _run_units_shape, lib=_library)
torch.library.register_fake("yggdrasil::move_rows", lambda caches, sources, destination: None, lib=_library)

_native = load_native()
if not _native:
    for _name, _function in _portable.items():
        _library.impl(_name, _function, "CPU")


def is_native() -> bool:
    """Whether the CPU operators are the compiled ones."""
    return _native
