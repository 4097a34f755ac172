"""Shape functions: allocate an operator's results, for tracing without running and as outputs of C calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, num_threads: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def quantised_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, form: int, num_threads: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def quantised_linears(  # noqa: PLR0913
    x: Tensor, gate: Tensor | None, gelu: bool, norm: Tensor | None, plus_one: bool, eps: float,
    residual: Tensor | None, packed: list[Tensor], biases: list[Tensor | None], out_features: list[int],
    formats: list[int], num_threads: int,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty((*x.shape[:-1], size)) for size in out_features]


def quantised_rows(ids: Tensor, packed: Tensor, form: int, inputs: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, inputs), dtype=dtype)


def packed_linears(  # noqa: PLR0913
    x: Tensor, gate: Tensor | None, gelu: bool, norm: Tensor | None, plus_one: bool, eps: float,
    residual: Tensor | None, packed: list[Tensor], biases: list[Tensor | None], out_features: list[int],
    num_threads: int,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty((*x.shape[:-1], size)) for size in out_features]


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, num_threads: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def packed_experts(  # noqa: PLR0913
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, biases: list[Tensor],
    inner_features: int, gelu: bool, clamp: list[float], num_threads: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


def quantised_experts(  # noqa: PLR0913
    x: Tensor, chosen: Tensor, shares: Tensor, packed: list[Tensor], formats: list[int], biases: list[Tensor],
    inner_features: int, gelu: bool, clamp: list[float], num_threads: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


def norm_rows(x: Tensor, norm: Tensor, plus_one: bool, eps: float, residual: Tensor | None, num_threads: int) -> Tensor:
    return x.new_empty(x.shape)


def best_tokens(logits: Tensor, num_threads: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0],)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def packed_best(
    x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, num_threads: int
) -> tuple[Tensor, Tensor]:
    return best_tokens(x.flatten(0, -2), num_threads)


def quantised_best(
    x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, form: int, num_threads: int
) -> tuple[Tensor, Tensor]:
    return best_tokens(x.flatten(0, -2), num_threads)


def bounded_argmax(
    x: Tensor, packed: Tensor, bias: Tensor | None, copy: Tensor, factors: Tensor, out_features: int, num_threads: int
) -> tuple[Tensor, Tensor]:
    return packed_best(x, packed, bias, out_features, num_threads)


def top_candidates(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (values.shape[0], k)
    return values.new_empty(shape), values.new_empty(shape, dtype=torch.int64)


def tree_attention(  # noqa: PLR0913
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, offsets: Tensor,
    tree_mask: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None, num_threads: int,
) -> Tensor:  # fmt: skip
    return query.new_empty((1, query.shape[2], query.shape[1], query.shape[3]))


def tree_convolution(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def tree_recurrence(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return value.new_empty(value.shape)


def commit_states(*_: Any) -> None:
    return None


def rows_attention(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, window: int, softcap: float,
    num_threads: int,
) -> Tensor:  # fmt: skip
    return query.new_empty(query.shape)


def run_stack(number: int, carried: Tensor, shared: list[Tensor], kept: list[int], num_threads: int) -> list[Tensor]:
    return [carried.new_empty(carried.shape) for _ in kept]


def move_rows(caches: list[Tensor], sources: list[int], destination: int) -> None:
    pass


SHAPES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        packed_linear,
        quantised_linear,
        quantised_linears,
        quantised_rows,
        packed_linears,
        plain_linear,
        packed_experts,
        quantised_experts,
        norm_rows,
        packed_best,
        quantised_best,
        bounded_argmax,
        best_tokens,
        top_candidates,
        tree_attention,
        rows_attention,
        tree_convolution,
        tree_recurrence,
        commit_states,
        run_stack,
        move_rows,
    )
}
