"""Replaces the recurrence functions of transformers' models by operators that follow the paths of a tree.

In all families, recurrent layers call functions of their Python module for convolution and recurrence, and pass on the
model's keyword arguments. These functions are wrapped: if the arguments have a ``step_cache``, the operators of this
module run instead.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.step_cache import StepCache

_Operator = Callable[..., Any]


def serve_recurrent_layers(model: PreTrainedModel) -> None:
    """Replace the recurrence functions in the Python modules of ``model``, so that recurrent layers process trees.

    Calls without a step's cache still run the original functions.

    Raises:
        YggdrasilError: none of the model's Python modules has such functions.
    """
    served = [_serve(sys.modules[name]) for name in {type(module).__module__ for module in model.modules()}]
    if not any(served):
        raise YggdrasilError(f"{type(model).__name__} has recurrent layers whose code does not support token trees")


def _serve(file: Any) -> bool:
    """Wrap the recurrence functions of the Python module ``file``; return whether it has any."""
    found = [name for name in _OPERATORS if name in vars(file)]
    for name in found:
        own = getattr(file, name)
        if not hasattr(own, "serves_trees"):
            setattr(file, name, _either(own, _OPERATORS[name]))
    return bool(found)


def _either(own: _Operator, ours: _Operator) -> _Operator:
    """Return a function that calls ``ours`` if the keyword arguments have a step's cache, else ``own``."""

    @wraps(own)
    def run(*arguments: Any, **named: Any) -> Any:
        return own(*arguments, **named) if named.get("step_cache") is None else ours(*arguments, **named)

    run.serves_trees = True  # type: ignore[attr-defined]
    return run


def _convolution(
    hidden_states: Tensor,  # [1, C, W]
    weight: Tensor,  # [C, K]
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    step_cache: StepCache,
    num_threads: int,
    **_: object,
) -> Tensor:
    """Compute the causal convolution along each row's path in the tree, [1, C, W]."""
    assert activation in (None, "silu", "swish"), f"{activation = }"
    window, inputs, *_rest = step_cache.own_states()
    rows: Tensor = torch.ops.yggdrasil.tree_convolution(
        hidden_states[0].t(), weight, bias, window, inputs, step_cache.offsets, step_cache.parents,
        activation is not None, num_threads,
    )  # fmt: skip
    return rows.t()[None]


def _gated_delta(
    query: Tensor,  # [1, W, Hk, Dk]
    key: Tensor,
    value: Tensor,  # [1, W, Hv, Dv]
    g: Tensor,  # [1, W, Hv]: the decay's logarithm
    beta: Tensor,  # [1, W, Hv]
    *,
    use_qk_l2norm_in_kernel: bool = False,
    step_cache: StepCache,
    num_threads: int,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute the gated delta rule along each row's path, [1, W, Hv, Dv]; the state is not updated before a commit."""
    assert use_qk_l2norm_in_kernel, "queries and keys are normalised"
    rows = _recur((query, key, value), g, beta, step_cache, num_threads, is_delta=True)
    return rows[None].to(query.dtype), None


def _state_space(  # noqa: PLR0913  (the signature is transformers')
    hidden_states: Tensor,  # [1, W, Hv, Dv]
    dt: Tensor,  # [1, W, Hv]
    A: Tensor,  # [Hv]
    B: Tensor,  # [1, W, Hk, Dk]
    C: Tensor,  # [1, W, Hk, Dk]
    chunk_size: int = 0,
    D: Tensor | None = None,  # [Hv]
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    step_cache: StepCache,
    num_threads: int,
    **_: object,
) -> Any:
    """Compute Mamba-2 along each row's path, [1, W, Hv, Dv] float32; the state is not updated before a commit."""
    time = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    time = nn.functional.softplus(time) if dt_softplus else time
    time = time.clamp(*dt_limit).float()[None]
    rows = _recur((C, B, hidden_states), A * time, time, step_cache, num_threads, is_delta=False)
    if D is not None:
        rows = rows + D[:, None] * hidden_states[0].float()
    return (rows[None], None) if return_final_states else rows[None]


def _recur(
    given: tuple[Tensor, Tensor, Tensor],  # queries, keys and values of the rows
    decay: Tensor,
    strength: Tensor,
    step_cache: StepCache,
    num_threads: int,
    *,
    is_delta: bool,
) -> Tensor:
    rows: Tensor = torch.ops.yggdrasil.tree_recurrence(
        *(each[0].float() for each in given), decay[0].float(), strength[0].float(), is_delta,
        *step_cache.own_states()[2:5], step_cache.offsets, step_cache.parents, num_threads,
    )  # fmt: skip
    return rows


_OPERATORS: dict[str, _Operator] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta,
    "mamba2_chunk_scan": _state_space,
}
