"""A mixture's experts as one operator over packed weights: rows that chose the same expert meet its weights together.

What transformers computes with them depends on how many rows meet an expert; here a row's result depends on it alone.
Experts of another form than the usual stay transformers' own.

Dims: W rows, H hidden size, E experts, K that a row chooses, I inner size of an expert.
"""

from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.checkpoints.formats.layers import QuantisedExperts
from yggdrasil.checkpoints.formats.rows import Quantise, QuantisedRows
from yggdrasil.checkpoints.packable import is_packable, page_out
from yggdrasil.native.arena import Arena

# What transformers says of its experts' classes, as the operator computes it; what says nothing is so.
_FORM = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_concatenated": True,  # the gate's outputs, then those that it multiplies
    "is_transposed": False,
    "_is_expert_parallel": False,
}


class PackedExperts(nn.Module):
    """Experts over weights in the layout of ``yggdrasil::packed_experts``; inference only."""

    gate_up_proj: Tensor  # [E, 2, ...], each as packed linears have theirs
    down_proj: Tensor  # [E, 1, ...]

    def __init__(self, experts: Any, is_gelu: bool, num_threads: int, arena: Arena) -> None:
        """Take the weights from ``experts``, which has none behind that: both copies of all would not fit memory."""
        super().__init__()
        self.is_gelu, self.num_threads = is_gelu, num_threads
        self.inner_features = experts.down_proj.shape[-1]
        for name, matrices in (("gate_up_proj", 2), ("down_proj", 1)):
            weight = getattr(experts, name).detach()
            setattr(experts, name, None)
            self.register_buffer(name, _packed(weight.unflatten(1, (matrices, -1)), arena))
            page_out(weight)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Of rows [W, H], experts [W, K] int64 and their weights [W, K] the weighted sums [W, H]."""
        output: Tensor = torch.ops.yggdrasil.packed_experts(
            hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, self.inner_features,
            self.is_gelu, self.num_threads,
        )  # fmt: skip
        return output


def pack_experts(
    name: str, module: nn.Module, num_threads: int, arena: Arena, quantise: Quantise
) -> PackedExperts | QuantisedExperts | None:
    """A mixture's experts over weights taken out of ``module``; None where the operators do not serve it."""
    if not is_served(module):
        return None
    rows, is_gelu = _quantised(name, module, quantise), bool(_is_gelu(module))
    if rows is None:
        return PackedExperts(module, is_gelu, num_threads, arena)
    return QuantisedExperts([each.pack(arena) for each in rows], is_gelu, num_threads)


def is_served(module: Any) -> bool:
    """Whether it is a mixture's experts of the form that the operators know."""
    return _has_usual_form(module) and _is_gelu(module) is not None


def expert_parts(name: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """The weights of experts called ``name``, gate and up apart, by name."""
    gate, up = gate_up.chunk(2, dim=1)
    return {f"{name}.{part}_proj.weight": weight for part, weight in (("gate", gate), ("up", up), ("down", down))}


def _quantised(name: str, module: Any, quantise: Quantise) -> list[QuantisedRows] | None:
    """Rows of gate, up and down; None where not all are given: the three are one operator."""
    found = []
    for part, weight in expert_parts(name, module.gate_up_proj, module.down_proj).items():
        rows = quantise(part, weight)
        if rows is None:
            return None
        found.append(rows)
    return found


def _has_usual_form(module: Any) -> bool:
    """Whether it is one of transformers' experts, gate and up in one tensor, and multiplies them as most do."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter) and _fit(gate_up, down)):
        return False
    from transformers.integrations.moe import use_experts_implementation  # here: no other model needs it

    # What the decorator gives a class: a forward around its own, and where it has none a way to gate.
    kind = type(module)
    is_decorated = hasattr(kind.forward, "__wrapped__") and hasattr(kind, "_apply_gate")
    is_gated_as_usual = is_decorated and kind._apply_gate.__module__ == use_experts_implementation.__module__
    return is_gated_as_usual and all(getattr(module, name, value) == value for name, value in _FORM.items())


def _is_gelu(module: Any) -> bool | None:
    """Whether the gate's function is gelu by tanh; False of silu, None of another."""
    from transformers.activations import ACT2FN

    kinds = {type(ACT2FN[name]): name.startswith("gelu") for name in ("silu", "swish", "gelu_pytorch_tanh")}
    return kinds.get(type(getattr(module, "act_fn", None)))


def _fit(gate_up: Tensor, down: Tensor) -> bool:
    """Whether they are [E, 2I, H] and [E, H, I], and can be packed."""
    if down.dim() != 3 or gate_up.dtype != down.dtype or not is_packable(gate_up) or not is_packable(down):
        return False
    experts, hidden, inner = down.shape
    return gate_up.shape == (experts, 2 * inner, hidden) and hidden % 2 == inner % 2 == 0


def _packed(weights: Tensor, arena: Arena) -> Tensor:
    """Matrices [E, M, N, K], each packed by itself."""
    shape = torch.ops.yggdrasil.packed_shape(weights[0, 0])
    packed = arena.zeros((*weights.shape[:2], *shape), weights.dtype)
    for matrix, place in zip(weights.flatten(0, 1), packed.flatten(0, 1), strict=True):
        torch.ops.yggdrasil.pack_linear(matrix, place)
    return packed
