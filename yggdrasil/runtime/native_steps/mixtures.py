"""Mixtures of experts in native steps: the properties of a model's mixtures, and their bytecode.

Dims: E experts, H hidden size, I intermediate size of an expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from yggdrasil.runtime.native_steps.bytecode import NOTHING, Writer
from yggdrasil.runtime.native_steps.packed import Linear, NotCoveredError, Weights

_BIASES = ("gate_bias", "up_bias", "down_bias")


# Functions from a router's logits to the experts' shares: softmax; sigmoid in the rows' dtype; sigmoid in float32.
_SOFTMAX, _SIGMOID, _SIGMOID_FLOAT32 = range(3)
_SILU, _SQUARED_RELU = 0, 2  # the kernels' numbers of activations
_SHARED_SIZES = {  # names of the intermediate size of shared experts
    "qwen3_next": "shared_expert_intermediate_size", "qwen3_5_moe_text": "shared_expert_intermediate_size",
    "granitemoehybrid": "shared_intermediate_size", "nemotron_h": "moe_shared_expert_intermediate_size",
}  # fmt: skip


@dataclass(frozen=True)
class Mixture:
    """Properties of the router, the experts and the shared experts of a model's mixtures."""

    num_chosen: int  # number of experts that run for a row
    inner_size: int  # intermediate size of an expert
    shared_size: int  # intermediate size of the shared experts; 0 without shared experts
    latent_size: int  # size of the experts' inputs and outputs, between two linear layers; 0 means the hidden size
    router: int  # _SOFTMAX, _SIGMOID or _SIGMOID_FLOAT32
    is_normed: bool  # whether the shares of a row's experts are scaled to the sum 1
    scale: float  # factor of the experts' sum
    activation: int  # _SILU, or _SQUARED_RELU of experts without a gate
    clamp: tuple[float, float]  # limit and alpha of a clamped gate; (0, 0) if it is not clamped

    @classmethod
    def of(cls, full: Mapping[str, Any]) -> "Mixture | None":
        """Return the properties of the mixtures of experts in a configuration; None if the model has no mixtures.

        Args:
            full: config.json as a mapping, with missing fields filled by ``with_defaults``.
        """
        if not any(full.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
            return None
        kind = full["model_type"]
        clamp = (float(full["swiglu_limit"]), float(full["swiglu_alpha"])) if "swiglu_limit" in full else (0.0, 0.0)
        return cls(
            int(full["num_experts_per_tok"]), int(full.get("moe_intermediate_size") or full["intermediate_size"]),
            int(full[_SHARED_SIZES[kind]]) if kind in _SHARED_SIZES else 0, int(full.get("moe_latent_size") or 0),
            {"lfm2_moe": _SIGMOID, "nemotron_h": _SIGMOID_FLOAT32}.get(kind, _SOFTMAX),
            bool(full.get("norm_topk_prob", True)), float(full.get("routed_scaling_factor") or 1.0),
            _SQUARED_RELU if kind == "nemotron_h" else _SILU, clamp,
        )  # fmt: skip


def write_mixture(
    writer: Writer,
    mixture: Mixture,
    weights: Weights,
    name: str,
    rows: int,
    residual: int,
    hidden_size: int,
    scale: float,
) -> int:
    """Write the bytecode of the mixture of experts ``name``: ``residual`` + ``scale`` * mixture(``rows``).

    Returns the tensor number of the sum in the bytecode.

    Args:
        name: the mixture's name in ``weights``, such as "model.layers.0.mlp".
        rows, residual: tensor numbers; the layer's norm is already applied to ``rows``.

    Raises:
        NotCoveredError: a tensor is missing or has an unsupported layout.
    """
    shared = next((f"{name}.{each}" for each in _SHARED if weights.has(f"{name}.{each}.down_proj.packed")), name)
    layers = {"logits": _router(weights, f"{name}.gate")} | _shared_inputs(mixture, weights, shared)
    if weights.has(f"{name}.shared_expert_gate.packed"):
        layers["share"] = weights.linear(f"{name}.shared_expert_gate", 1)
    if mixture.latent_size:
        layers["latent"] = weights.linear(f"{name}.fc1_latent_proj", mixture.latent_size)
    given = dict(zip(layers, writer.linears(rows, list(layers.values())), strict=True))
    experts = f"{name}.experts"
    packed, formats = _packed_experts(writer, weights, experts)
    biases = [writer.tensor(weights.tensors.get(f"{experts}.{part}")) for part in _BIASES]
    found = (weights.tensors.get(f"{name}.{part}") for part in ("expert_bias", "gate.e_score_correction_bias"))
    correction = next((each.float() for each in found if each is not None), None)
    is_last = not mixture.latent_size
    gated = (given["up"], given["share"]) if "share" in given else (NOTHING, NOTHING)
    total = writer.experts(
        [given.get("latent", rows), given["logits"], writer.tensor(correction), *gated,
         residual if is_last else NOTHING],
        [mixture.router, int(mixture.is_normed), mixture.num_chosen, mixture.inner_size, mixture.activation],
        [*packed, *biases], formats, [scale * mixture.scale if is_last else mixture.scale, *mixture.clamp],
    )  # fmt: skip
    if not is_last:
        up = weights.linear(f"{name}.fc2_latent_proj", hidden_size)
        (total,) = writer.linears(total, [up], residual=residual, scale=scale)
    if "up" not in given:
        return total
    gate, down = given.get("gate", given["up"]), weights.linear(f"{shared}.down_proj", hidden_size)
    (total,) = writer.linears(
        given["up"], [down], gate=gate, activation=mixture.activation, residual=total, scale=scale
    )
    return total


_SHARED = ("shared_expert", "shared_experts")


def _shared_inputs(mixture: Mixture, weights: Weights, name: str) -> dict[str, Linear]:
    """Return the linear layers of the shared experts ``name`` that read the rows: gate, if there is one, and up."""
    if not mixture.shared_size:
        return {}
    if weights.has(f"{name}.gate_up_proj.packed"):
        both = weights.split(f"{name}.gate_up_proj", [mixture.shared_size] * 2)
        return dict(zip(("gate", "up"), both, strict=True))
    parts = ("gate", "up") if mixture.activation != _SQUARED_RELU else ("up",)
    return {part: weights.linear(f"{name}.{part}_proj", mixture.shared_size) for part in parts}


def _packed_experts(writer: Writer, weights: Weights, name: str) -> tuple[list[int], list[int]]:
    """Return tensor numbers and formats of gate, up, down; gate equals up if both are one tensor, or without gate."""
    if weights.has(f"{name}.gate_up_proj") and weights.tensors[f"{name}.gate_up_proj"].dim() > 3:
        gate, down = (writer.tensor(weights.tensors[f"{name}.{part}"]) for part in ("gate_up_proj", "down_proj"))
        return [gate, gate, down], [-1] * 3
    first = "gate" if weights.has(f"{name}.gate_proj") else "up"
    parts = [f"{name}.{part}_proj" for part in (first, "up", "down")]
    if not all(weights.has(part) for part in parts):
        raise NotCoveredError(f"{name} are not packed")
    numbers = {part: writer.tensor(weights.tensors[part]) for part in dict.fromkeys(parts)}
    return [numbers[part] for part in parts], [weights.format_of(part) for part in parts]


def _router(weights: Weights, name: str) -> Linear:
    """Return the router, its weight [E, H] packed in the model's dtype: loading a model does not pack routers."""
    weight: Tensor | None = weights.tensors.get(f"{name}.weight")
    if weight is None or weight.shape[1] % 2:
        raise NotCoveredError(f"{name} has no weight of an even size")
    weight = weight.to(weights.tensors["model.norm.weight"].dtype)
    packed = torch.zeros(torch.ops.yggdrasil.packed_shape(weight), dtype=weight.dtype)
    torch.ops.yggdrasil.pack_linear(weight.detach().contiguous(), packed)
    bias = weights.tensors.get(f"{name}.bias")
    return Linear(packed, None if bias is None else bias.float(), weight.shape[0], -1)
