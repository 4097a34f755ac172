"""Mixture-of-experts layers as one operator over packed weights; rows routed to the same expert are batched.

A row's result is independent of the other rows; in transformers, the result depends on how many rows are routed to an
expert. Experts in a form that the operators do not support keep transformers' implementation.

Dims: W rows, H hidden size, E experts, K experts per row, I intermediate size of an expert.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from yggdrasil.checkpoints.formats.layers import QuantisedExperts, register_biases, registered_biases
from yggdrasil.checkpoints.formats.rows import Quantise, QuantisedRows
from yggdrasil.checkpoints.packable import is_packable, page_out
from yggdrasil.native.arena import Arena
from yggdrasil.native.portable import clamped_gate, gated

# Attributes of transformers' experts modules and the only values that the operators support; a missing one is fine.
_REQUIRED = {"has_post_expert_norm": False, "_is_expert_parallel": False}
SILU, GELU, SQUARED_RELU = range(3)  # numbers of activations in the operators


class ExpertsForm(NamedTuple):
    """The layout in which a mixture's experts store their weights, and the experts' activation and clamp."""

    is_concatenated: bool  # gate outputs precede up outputs; else they are interleaved
    is_transposed: bool  # a weight is [E, inputs, outputs]
    has_bias: bool
    activation: int  # of the gate: SiLU or tanh-approximated GELU; experts with squared ReLU have no gate
    clamp: tuple[float, ...]  # empty (no clamp), or (limit, alpha) of ``clamped_gate``

    @property
    def has_gate(self) -> bool:
        return self.activation != SQUARED_RELU

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of an experts module's two weights: gate and up (or up without a gate), then down."""
        return "gate_up_proj" if self.has_gate else "up_proj", "down_proj"

    def parts(self, experts: Any) -> dict[str, Tensor]:
        """Return the weights of an experts module: "gate" (if there is one) and "up" [E, I, H], "down" [E, H, I]."""
        first, down = (getattr(experts, name) for name in self.names)
        parts = dict(zip(("gate", "up"), self.gate_up(first), strict=True)) if self.has_gate else {"up": first}
        return {**parts, "down": self.down(down)}

    def gate_up(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Split the experts' joint gate-and-up weight into views [E, I, H] each, or their joint bias into [E, I]."""
        weight = weight.transpose(1, 2) if self.is_transposed and weight.dim() == 3 else weight
        if self.is_concatenated:
            gate, up = weight.chunk(2, dim=1)
            return gate, up
        return weight[:, ::2], weight[:, 1::2]

    def joined(self, gate: Tensor, up: Tensor) -> Tensor:
        """Join the experts' gate and up weights [E, I, H], or biases [E, I], into one tensor as in checkpoints."""
        weight = torch.cat([gate, up], 1) if self.is_concatenated else torch.stack([gate, up], 2).flatten(1, 2)
        return weight.transpose(1, 2).contiguous() if self.is_transposed and weight.dim() == 3 else weight

    def down(self, weight: Tensor) -> Tensor:
        """Convert the experts' down projection from the checkpoint's layout to [E, H, I], or back from [E, H, I].

        The result is a view of ``weight``.
        """
        return weight.transpose(1, 2) if self.is_transposed and weight.dim() == 3 else weight

    def biases(self, experts: Any) -> list[Tensor]:
        """Return an experts module's float32 biases, gate [E, I], up [E, I] and down [E, H]; empty without biases."""
        if not self.has_bias:
            return []
        parts = (*self.gate_up(experts.gate_up_proj_bias), experts.down_proj_bias)
        return [part.detach().float().contiguous() for part in parts]


class PackedExperts(nn.Module):
    """A mixture's experts, with weights in the layout of ``yggdrasil::packed_experts``; inference only."""

    gate_up_proj: Tensor  # [E, 2, ...], each matrix packed like that of a ``PackedLinear``; without a gate [E, 1, ...]
    down_proj: Tensor  # [E, 1, ...]

    def __init__(self, experts: Any, form: ExpertsForm, num_threads: int, arena: Arena) -> None:
        """Pack the weights of ``experts`` and set them to None there: memory may not hold both copies."""
        super().__init__()
        self.num_threads, self.activation, self.clamp = num_threads, form.activation, list(form.clamp)
        self.inner_features = form.down(experts.down_proj).shape[-1]
        register_biases(self, form.biases(experts))
        *first, down = (part.detach() for part in form.parts(experts).values())
        for name, own, parts in zip(("gate_up_proj", "down_proj"), form.names, (first, [down]), strict=True):
            weight = getattr(experts, own).detach()
            setattr(experts, own, None)
            self.register_buffer(name, _packed(parts, arena))
            page_out(weight)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums [W, H] of the outputs of each row's experts.

        ``hidden_states`` are [W, H], ``top_k_index`` [W, K] int64 the expert ids, and ``top_k_weights`` [W, K] the
        factors of the experts' outputs.
        """
        output: Tensor = torch.ops.yggdrasil.packed_experts(
            hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, registered_biases(self),
            self.inner_features, self.activation, self.clamp, self.num_threads,
        )  # fmt: skip
        return output


def pack_experts(
    name: str, module: nn.Module, num_threads: int, arena: Arena, quantise: Quantise, device: torch.device
) -> PackedExperts | QuantisedExperts | None:
    """Return a module with packed weights that replaces the experts module ``module``.

    The result is None if ``module`` is no mixture of experts, or has a form that the operators do not support, or
    ``device`` is a GPU and the weights are not quantised. Weights that are packed unquantised are set to None in
    ``module``.

    Args:
        name: the module's name in the model, which precedes the names of the parts that ``quantise`` gets.
        num_threads: threads of the operator.
        arena: provides the memory of the packed weights.
        quantise: returns the quantised rows of a part, or None; all parts stay unquantised if it returns None for one.
        device: where the weights are packed to.

    Raises:
        YggdrasilError: the device is a GPU, and the weights have a format without a GPU kernel.
    """
    form = form_of(module)
    if form is None:
        return None
    is_here = device.type == "cpu"
    rows = _quantised(name, module, form, quantise)
    if rows is None:
        return PackedExperts(module, form, num_threads, arena) if is_here else None
    packed = [each.pack(arena) if is_here else each.on_gpu(device) for each in rows]
    return QuantisedExperts(packed, form.activation, num_threads, form.biases(module), form.clamp)


def form_of(module: Any) -> ExpertsForm | None:
    """Return how the experts module ``module`` stores its weights, with activation and clamp.

    The result is None if ``module`` is no mixture of experts, or has a form that the operators do not support.
    """
    has_gate = bool(getattr(module, "has_gate", True))
    weights = [getattr(module, name, None) for name in ("gate_up_proj" if has_gate else "up_proj", "down_proj")]
    if not all(isinstance(weight, nn.Parameter) and weight.dim() == 3 and is_packable(weight) for weight in weights):
        return None
    kind = type(module)
    # transformers' decorator wraps the forward of a class and adds a default ``_apply_gate``.
    is_decorated = hasattr(kind.forward, "__wrapped__") and hasattr(kind, "_apply_gate")
    if not is_decorated or any(getattr(module, name, value) != value for name, value in _REQUIRED.items()):
        return None
    is_concatenated, is_transposed, has_bias = (
        bool(getattr(module, name, default))
        for name, default in (("is_concatenated", True), ("is_transposed", False), ("has_bias", False))
    )
    gate = _gate_of(module, is_concatenated=is_concatenated) if has_gate else _squared_relu_of(module)
    if not has_gate and (is_transposed or has_bias):
        return None
    form = None if gate is None else ExpertsForm(is_concatenated, is_transposed, has_bias, *gate)
    return form if form is not None and _fits(module, form) else None


def _squared_relu_of(module: Any) -> tuple[int, tuple[float, ...]] | None:
    """Return (``SQUARED_RELU``, no clamp) if that is the activation of experts without a gate, else None."""
    sample = _probe()
    try:
        is_squared = torch.allclose(module.act_fn(sample), sample.relu() * sample)
    except (RuntimeError, AttributeError, TypeError, ValueError):
        return None
    return (SQUARED_RELU, ()) if is_squared else None


def _gate_of(module: Any, *, is_concatenated: bool) -> tuple[int, tuple[float, ...]] | None:
    """Return (the gate's activation, its clamp) by comparing outputs on samples; None if the gate is unsupported."""
    both = _probe()
    gates, ups = both.chunk(2, dim=-1) if is_concatenated else (both[..., ::2], both[..., 1::2])
    try:
        given = module._apply_gate(both)
    except (RuntimeError, AttributeError, TypeError, ValueError):
        return None
    limit, alpha = (getattr(module, name, None) for name in ("limit", "alpha"))
    candidates: list[tuple[Tensor, tuple[int, tuple[float, ...]]]]
    candidates = [(gated(gates, ups, kind), (kind, ())) for kind in (SILU, GELU)]
    if isinstance(limit, float) and isinstance(alpha, float) and limit > 0:
        candidates.append((clamped_gate(gates, ups, limit, alpha), (SILU, (limit, alpha))))
    return next((gate for ours, gate in candidates if torch.allclose(ours, given, rtol=1e-5, atol=1e-6)), None)


@cache
def _probe() -> Tensor:
    """Return sample inputs of a gate, [64, 32] float32, some beyond the limits of clamps."""
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 6


def expert_parts(name: str, module: Any, form: ExpertsForm) -> dict[str, Tensor]:
    """Return the weights that ``form.parts`` gives of the experts module ``name``, by names of linear layers.

    The names are ``NAME.gate_proj.weight`` (if there is a gate), ``NAME.up_proj.weight`` and
    ``NAME.down_proj.weight``, in this order.
    """
    return {f"{name}.{part}_proj.weight": weight for part, weight in form.parts(module).items()}


def _quantised(name: str, module: Any, form: ExpertsForm, quantise: Quantise) -> list[QuantisedRows] | None:
    """Return the quantised rows of the experts' parts; None unless ``quantise`` returns rows of all."""
    found = []
    for part, weight in expert_parts(name, module, form).items():
        rows = quantise(part, weight)
        if rows is None:
            return None
        found.append(rows)
    return found


def _fits(module: Any, form: ExpertsForm) -> bool:
    """Return whether the shapes of gate, up, down and biases agree and both sizes are even, as packing requires."""
    *firsts, down = form.parts(module).values()
    experts, hidden, inner = down.shape
    is_whole = all(first.shape == (experts, inner, hidden) and first.dtype == down.dtype for first in firsts)
    if form.has_bias:
        biases = [getattr(module, f"{name}_bias", None) for name in form.names]
        is_whole = is_whole and [getattr(bias, "shape", None) for bias in biases] == [
            (experts, 2 * inner), (experts, hidden),
        ]  # fmt: skip
    return is_whole and hidden % 2 == inner % 2 == 0


def _packed(parts: Sequence[Tensor], arena: Arena) -> Tensor:
    """Pack every expert's matrix of each of the M ``parts`` [E, N, K] separately, and return [E, M, ...]."""
    shape = torch.ops.yggdrasil.packed_shape(parts[0][0])
    packed = arena.zeros((parts[0].shape[0], len(parts), *shape), parts[0].dtype)
    for expert, places in enumerate(packed):
        for part, place in zip(parts, places, strict=True):
            torch.ops.yggdrasil.pack_linear(part[expert].contiguous(), place)
    return packed
