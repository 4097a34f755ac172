"""Mixtures of experts in native steps: how a model's router chooses, and the bytecode of a mixture.

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


@dataclass(frozen=True)
class Mixture:
    """The router and the experts of a model's mixtures, and the shared experts beside them."""

    num_chosen: int  # experts that a row chooses
    inner_size: int  # I
    shared_size: int  # intermediate size of the shared experts; 0: there are none
    is_sigmoid: bool  # shares are sigmoids of the router's logits, else their softmax
    is_normed: bool  # the chosen experts' shares add up to one
    scale: float  # factor of the experts' sum
    clamp: tuple[float, float]  # limit and alpha of a clamped gate; (0, 0): it is not clamped

    @classmethod
    def of(cls, full: Mapping[str, Any]) -> "Mixture | None":
        """Return the properties of the mixtures of experts in a configuration; None if it has none.

        ``full`` is the configuration with missing fields filled by defaults.
        """
        if not (full.get("num_local_experts") or full.get("num_experts")):
            return None
        clamp = (float(full["swiglu_limit"]), float(full["swiglu_alpha"])) if "swiglu_limit" in full else (0.0, 0.0)
        names = {"qwen3_5_moe_text": "shared_expert_intermediate_size", "granitemoehybrid": "shared_intermediate_size"}
        shared = full[names[full["model_type"]]] if full["model_type"] in names else 0
        return cls(
            int(full["num_experts_per_tok"]), int(full.get("moe_intermediate_size") or full["intermediate_size"]),
            int(shared), full["model_type"] == "lfm2_moe", bool(full.get("norm_topk_prob", True)),
            float(full.get("routed_scaling_factor") or 1.0), clamp,
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
    """Write the bytecode of the mixture of experts ``name``: ``residual`` + ``scale`` * its output over ``rows``.

    ``rows`` and ``residual`` are tensor numbers; the rows are already normalised. Return the number of the sum.

    Raises:
        NotCoveredError: a tensor is missing or has an unsupported layout.
    """
    shared = f"{name}.shared_expert" if weights.has(f"{name}.shared_expert.down_proj.packed") else name
    read = [_router(weights, f"{name}.gate")]
    has_shared = mixture.shared_size > 0
    if has_shared and weights.has(f"{shared}.gate_up_proj.packed"):
        read += weights.joined(f"{shared}.gate_up_proj", [mixture.shared_size] * 2)
    elif has_shared:
        read += [weights.linear(f"{shared}.{part}_proj", mixture.shared_size) for part in ("gate", "up")]
    has_gate = weights.has(f"{name}.shared_expert_gate.packed")
    read += [weights.linear(f"{name}.shared_expert_gate", 1)] if has_gate else []
    logits, *beside = writer.linears(rows, read)
    experts = f"{name}.experts"
    packed, formats = _packed_experts(writer, weights, experts)
    biases = [writer.tensor(weights.tensors.get(f"{experts}.{part}")) for part in _BIASES]
    correction = weights.tensors.get(f"{name}.expert_bias")
    given = writer.experts(
        [rows, logits, writer.tensor(None if correction is None else correction.float()),
         *((beside[1], beside[2]) if has_gate else (NOTHING, NOTHING)), residual],
        [int(mixture.is_sigmoid), int(mixture.is_normed), mixture.num_chosen, mixture.inner_size, 0],
        [*packed, *biases], formats, [scale * mixture.scale, *mixture.clamp],
    )  # fmt: skip
    if not has_shared:
        return given
    down = weights.linear(f"{shared}.down_proj", hidden_size)
    (whole,) = writer.linears(beside[1], [down], gate=beside[0], residual=given, scale=scale)
    return whole


def _packed_experts(writer: Writer, weights: Weights, name: str) -> tuple[list[int], list[int]]:
    """Return the tensor numbers and formats of gate, up and down."""
    if weights.has(f"{name}.gate_up_proj") and weights.tensors[f"{name}.gate_up_proj"].dim() > 3:
        gate, down = (writer.tensor(weights.tensors[f"{name}.{part}"]) for part in ("gate_up_proj", "down_proj"))
        return [gate, gate, down], [-1] * 3
    parts = [f"{name}.{part}_proj" for part in ("gate", "up", "down")]
    if not all(weights.has(part) for part in parts):
        raise NotCoveredError(f"{name} are not packed")
    return [writer.tensor(weights.tensors[part]) for part in parts], [weights.format_of(part) for part in parts]


def _router(weights: Weights, name: str) -> Linear:
    """Pack the router's weight [E, H]: it is no linear layer of the model."""
    weight: Tensor | None = weights.tensors.get(f"{name}.weight")
    if weight is None or weight.shape[1] % 2:
        raise NotCoveredError(f"{name} has no weight of an even size")
    packed = torch.zeros(torch.ops.yggdrasil.packed_shape(weight), dtype=weight.dtype)
    torch.ops.yggdrasil.pack_linear(weight.detach().contiguous(), packed)
    bias = weights.tensors.get(f"{name}.bias")
    return Linear(packed, None if bias is None else bias.float(), weight.shape[0], -1)
