"""Bytecode of the parts of a layer: attention, LFM2's short convolution, gated delta networks, Mamba-2, the MLP.

Dims: H hidden size, C channels, K taps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yggdrasil.runtime.native_steps.bytecode import CARRIED, FIRST_TURN, MASK, NOTHING, OFFSETS, Writer
from yggdrasil.runtime.native_steps.description import Description, LayerShape
from yggdrasil.runtime.native_steps.families import BOTH, CONVOLUTION, DELTA, SPACE
from yggdrasil.runtime.native_steps.packed import Linear, NotCoveredError, Weights
from yggdrasil.runtime.states.buffers import StateBuffers


class Mixed(NamedTuple):
    """The last linear layer of attention, a recurrence or an MLP, whose bytecode the caller writes, and its input."""

    rows: int  # tensor number of the layer's input in the bytecode
    layer: Linear
    reads: Mapping[str, Any] = {}  # keyword arguments of ``Writer.linears`` for the input, such as its gate


def write_attention(
    writer: Writer,
    model: Description,
    shape: LayerShape,
    weights: Weights,
    name: str,
    norm: Tensor | None,
    caches: Sequence[Tensor],
) -> Mixed:
    """Write the bytecode of the attention layer ``name``, except for its output projection.

    Returns the output projection and its input; the caller writes the projection, fused with the stages after it.

    Args:
        name: the layer's name in ``weights``, such as "model.layers.0.self_attn".
        norm: [H], the weight of the RMS norm of the layer's input; None without a norm.
        caches: the layer's key and value caches, [Hkv, S, D] each. The bytecode writes the pass's rows to them and
            reads all rows.

    Raises:
        NotCoveredError: a tensor is missing or has an unsupported layout.
    """
    sizes = [heads * model.head_size for heads in (model.query_heads, model.key_heads, model.key_heads)]
    sizes[0] *= 2 if model.is_gated else 1
    if weights.has(f"{name}.qkv_proj.packed"):
        layers = weights.split(f"{name}.qkv_proj", sizes)
    else:
        parts = ("q_proj", "k_proj", "v_proj")
        layers = [weights.linear(f"{name}.{part}", size) for part, size in zip(parts, sizes, strict=True)]
    query, key, value = writer.linears(CARRIED, layers, norm=norm, norm_kind=model.norm_kind, eps=model.norm_eps)
    query, key, head_norms = _normed_heads(writer, model, weights, name, (query, key))
    turn = [NOTHING] * 2 if shape.rope is None else _turn_of(model, shape.rope)
    own, sinks = [writer.tensor(cache) for cache in caches], weights.tensors.get(f"{name}.sinks")
    sinks = None if sinks is None else sinks.float()
    attended = writer.attention(
        [query, key, value, *head_norms, *turn, *own, writer.tensor(sinks), OFFSETS, MASK],
        [shape.window, model.norm_kind, model.turn, int(model.is_gated)], [model.norm_eps, model.scale, model.softcap],
    )  # fmt: skip
    return Mixed(attended, weights.linear(f"{name}.o_proj", model.hidden_size))


def _normed_heads(
    writer: Writer, model: Description, weights: Weights, name: str, rows: tuple[int, int]
) -> tuple[int, int, list[int]]:
    """Return tensor numbers (queries, keys, [norms of each head]); a norm over all heads is written as a stage."""
    norms = [weights.tensors.get(f"{name}.{part}.weight") for part in ("q_norm", "k_norm")]
    query, key = rows
    if norms[0] is None or norms[1] is None:
        return query, key, [NOTHING] * 2
    if norms[0].shape[0] == model.head_size:
        return query, key, [writer.tensor(norm) for norm in norms]
    query, key = (
        writer.norm(source, norm, model.norm_kind, model.norm_eps)
        for source, norm in zip(rows, (norms[0], norms[1]), strict=True)
    )
    return query, key, [NOTHING] * 2


def _turn_of(model: Description, rope: str) -> list[int]:
    """Return the tensor numbers of a rotary table's cosines and sines."""
    first = FIRST_TURN + 2 * list(model.ropes).index(rope)
    return [first, first + 1]


def write_short_convolution(
    writer: Writer, model: Description, weights: Weights, name: str, norm: Tensor | None, states: Sequence[Tensor]
) -> Mixed:
    """Write the bytecode of LFM2's gated short convolution ``name``, except for its output projection.

    Returns the output projection and its input; the caller writes the projection, fused with the stages after it.

    Args:
        name: the layer's name in ``weights``, such as "model.layers.0.conv".
        norm: [H], the weight of the RMS norm of the layer's input; None without a norm.
        states: the layer's buffers: the window [K - 1, C] of the text's last inputs, which is read, and a buffer [M, C]
            to which the inputs of the pass's rows are written.

    Raises:
        NotCoveredError: a tensor is missing or has an unsupported layout.
    """
    layers = weights.split(f"{name}.in_proj", [model.hidden_size] * 3)
    factor, gate, source = writer.linears(CARRIED, layers, norm=norm, norm_kind=model.norm_kind, eps=model.norm_eps)
    taps = _taps(writer, weights, f"{name}.conv", states)
    rows = writer.convolution([source, factor, gate, *taps, OFFSETS, parents_tensor(model)])
    return Mixed(rows, weights.linear(f"{name}.out_proj", model.hidden_size))


def write_gated_delta(
    writer: Writer, model: Description, weights: Weights, name: str, norm: Tensor | None, states: Sequence[Tensor]
) -> Mixed:
    """Write the bytecode of the gated delta net ``name``, except for its output projection.

    Returns the output projection and its input; the caller writes the projection, fused with the stages after it.

    Args:
        name: the layer's name in ``weights``, such as "model.layers.0.linear_attn".
        norm: [H], the weight of the RMS norm of the layer's input; None without a norm.
        states: the layer's buffers as ``StateBuffers.of_layer`` returns them. This function writes the convolution's
            weight and bias to the last two.

    Raises:
        NotCoveredError: a tensor is missing or has an unsupported layout.
    """
    sizes = model.recurrence
    assert sizes is not None, "the layer is recurrent"
    outputs = {"qkv": sizes.conv_channels, "z": sizes.heads * sizes.value_size, "a": sizes.heads, "b": sizes.heads}
    layers = [weights.linear(f"{name}.in_proj_{part}", size) for part, size in outputs.items()]
    mixed, gate, decay, beta = writer.linears(CARRIED, layers, norm=norm, norm_kind=model.norm_kind, eps=model.norm_eps)
    taps = _taps(writer, weights, f"{name}.conv1d", states)
    mixed = writer.convolution([mixed, NOTHING, NOTHING, *taps, OFFSETS, parents_tensor(model)], is_silu=True)
    bias, rate, own = (weights.tensors.get(f"{name}.{part}") for part in ("dt_bias", "A_log", "norm.weight"))
    if bias is None or rate is None or own is None:
        raise NotCoveredError(f"{name} lacks decays or its norm")
    operands = [writer.tensor(tensor) for tensor in (bias.float(), -rate.float().exp(), own, *states[2:5])]
    values = [mixed, decay, beta, gate, *operands[:2], NOTHING, *operands[2:], OFFSETS, parents_tensor(model)]
    rows = writer.recurrence(values, [model.norm_eps, 0.0, 0.0])
    return Mixed(rows, weights.linear(f"{name}.out_proj", model.hidden_size))


def write_state_space(
    writer: Writer, model: Description, weights: Weights, name: str, norm: Tensor | None, states: Sequence[Tensor]
) -> Mixed:
    """Write the bytecode of the Mamba-2 layer ``name``, except for its output projection.

    Returns the output projection and its input; the caller writes the projection, fused with the stages after it.

    Args:
        name: the layer's name in ``weights``, such as "model.layers.0.mamba".
        norm: [H], the weight of the RMS norm of the layer's input; None without a norm.
        states: the layer's buffers as ``StateBuffers.of_layer`` returns them. This function writes the convolution's
            weight (times the model's input factors) and bias to the last two.

    Raises:
        NotCoveredError: a tensor is missing or has an unsupported layout.
    """
    sizes, form, scales = model.recurrence, model.state_space, model.scales.inputs
    assert sizes is not None, "the layer is recurrent"
    assert form is not None, "the layer is Mamba-2"
    values, keys = sizes.heads * sizes.value_size, sizes.key_heads * sizes.key_size
    layers = weights.split(f"{name}.in_proj", [values, sizes.conv_channels, sizes.heads])
    read: dict[str, Any] = {"norm": norm, "norm_kind": model.norm_kind, "eps": model.norm_eps}
    given: list[int] = []
    if scales[0] == scales[4] == 1.0:
        given += writer.linears(CARRIED, layers, **read)
    else:
        for layer, scale in zip(layers, (scales[0], 1.0, scales[4]), strict=True):
            given += writer.linears(CARRIED, [layer], scale=scale, **read)
    gate, mixed, time = given
    # A convolution is linear: its taps are scaled instead of its inputs.
    factors = torch.tensor(scales[1:4]).repeat_interleave(torch.tensor([values, keys, keys]))
    taps = _taps(writer, weights, f"{name}.conv1d", states, factors)
    mixed = writer.convolution([mixed, NOTHING, NOTHING, *taps, OFFSETS, parents_tensor(model)], is_silu=True)
    bias, rate, skip = (weights.tensors.get(f"{name}.{part}") for part in ("dt_bias", "A_log", "D"))
    if bias is None or rate is None or skip is None:
        raise NotCoveredError(f"{name} lacks time steps, decays or what its inputs are multiplied by")
    own = [bias.float(), -rate.float().exp(), skip.float(), weights.tensors.get(f"{name}.norm.weight"), *states[2:5]]
    operands = [writer.tensor(tensor) for tensor in own]
    rows = writer.recurrence(
        [mixed, time, NOTHING, gate, *operands, OFFSETS, parents_tensor(model)], [model.norm_eps, *form.limits],
        is_normed_first=form.is_normed_first,
    )  # fmt: skip
    return Mixed(rows, weights.linear(f"{name}.out_proj", model.hidden_size))


def write_mlp(
    writer: Writer, model: Description, weights: Weights, name: str, source: int, norm: Tensor | None
) -> Mixed:
    """Write the bytecode of the gate and up projections of the MLP ``name``, with the norm before them.

    Activation and down projection are not written. The caller writes both by one call of ``Writer.linears`` with the
    result: the down projection, the tensor number of its input (up's output), and the gate with its activation. An MLP
    without a gate has up's output as its gate.

    Args:
        name: the MLP's name in ``weights``, such as "model.layers.0.mlp".
        source: tensor number of the input in the bytecode.
        norm: [H], the weight of the RMS norm of this input; None without a norm.

    Raises:
        NotCoveredError: a tensor is missing or has an unsupported layout.
    """
    read: dict[str, Any] = {"norm": norm, "norm_kind": model.norm_kind, "eps": model.norm_eps}
    down, scale = weights.linear(f"{name}.down_proj", model.hidden_size), model.scales.gate
    if weights.has(f"{name}.gate_up_proj.packed"):
        layers = weights.split(f"{name}.gate_up_proj", [model.inner_size] * 2)
    else:
        parts = ("gate_proj", "up_proj") if weights.has(f"{name}.gate_proj.packed") else ("up_proj",)
        layers = [weights.linear(f"{name}.{part}", model.inner_size) for part in parts]
    if scale == 1.0:
        given = writer.linears(source, layers, **read)
    else:
        given = [*writer.linears(source, layers[:1], scale=scale, **read), *writer.linears(source, layers[1:], **read)]
    return Mixed(given[-1], down, {"gate": given[0], "activation": model.activation})


RECURRENT: Mapping[str, tuple[str, Callable[..., Mixed]]] = {
    CONVOLUTION: ("conv", write_short_convolution), DELTA: ("linear_attn", write_gated_delta),
    SPACE: ("mamba", write_state_space), BOTH: ("mamba", write_state_space),
}  # fmt: skip


def _taps(
    writer: Writer, weights: Weights, name: str, states: Sequence[Tensor], factors: Tensor | float = 1.0
) -> list[int]:
    """Return the tensor numbers of convolution ``name``: weight [K, C] and bias [C], float32, window, input buffer.

    The weight is multiplied by ``factors`` [C]. Weight and bias are written to their buffers in ``states``, if any.
    """
    weight, bias = (weights.tensors.get(f"{name}.{part}") for part in ("weight", "bias"))
    if weight is None:
        raise NotCoveredError(f"{name} has no weight")
    taps = weight.flatten(1).t().float() * factors
    window, inputs, *rest = states
    if rest:
        own_taps, own_bias = rest[3:]
        StateBuffers.set_weights(own_taps, own_bias, taps, bias)
        own: list[Tensor | None] = [own_taps, own_bias, window, inputs]
    else:
        own = [taps.contiguous(), None if bias is None else bias.float(), window, inputs]
    return [writer.tensor(tensor) for tensor in own]


def parents_tensor(model: Description) -> int:
    """Return the number, in a layer's bytecode, of the tensor [W] int64 with each row's parent row in the tree.

    ``model`` must have recurrent layers; the bytecode of other models has no such tensor.
    """
    return FIRST_TURN + 2 * len(model.ropes)
