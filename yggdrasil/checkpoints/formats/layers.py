"""Modules with quantised weights that replace a model's layers, with the same names and shapes.

Inputs are rounded to int8 with one scale per block of the format, 32 or 256 inputs, before they are multiplied. The
rounding of a row depends on that row alone, so it is the same at every width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import yggdrasil.native  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.checkpoints.formats.rows import PackedRows


class QuantisedLinear(nn.Module):
    """``nn.Linear`` with quantised weights; inference only. ``dtype`` is the dtype that ``weight`` reports."""

    packed: Tensor
    bias: Tensor | None

    def __init__(
        self, weight: PackedRows, bias: Tensor | None, num_threads: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.format, self.out_features, self.in_features, packed = weight
        self.num_threads, self._dtype = num_threads, dtype
        self.register_buffer("packed", packed)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def weight(self) -> Tensor:
        """Return an empty tensor with the inputs' dtype and the weights' device.

        Some models read dtype and device to convert a layer's input.
        """
        return self.packed.new_empty(0, dtype=self._dtype)

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight rows [R, K] of the outputs numbered ``outputs`` [R] int64, in ``dtype``."""
        found: Tensor = torch.ops.yggdrasil.quantised_rows(
            outputs, self.packed, self.format, self.in_features, self.out_features, dtype
        )
        return found

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        """Apply the quantised linear layer to ``x`` [..., K], and return [..., N]."""
        output: Tensor = torch.ops.yggdrasil.quantised_linear(
            x, self.packed, self.bias, self.out_features, self.format, self.num_threads
        )
        return output


_BIASES = ("gate_bias", "up_bias", "down_bias")  # buffer names of experts' biases


def register_biases(experts: nn.Module, biases: Sequence[Tensor]) -> None:
    """Register the biases of an experts module as its buffers.

    Args:
        biases: gate [E, I], up [E, I] and down [E, H], float32; or empty, which registers nothing.
    """
    for name, bias in zip(_BIASES, biases, strict=bool(biases)):
        experts.register_buffer(name, bias)


def registered_biases(experts: nn.Module) -> list[Tensor]:
    """Return an experts module's float32 biases, gate [E, I], up [E, I] and down [E, H]; empty without biases."""
    return [getattr(experts, name) for name in _BIASES if hasattr(experts, name)]


class QuantisedExperts(nn.Module):
    """A mixture's experts with quantised weights, the counterpart of ``PackedExperts``; inference only."""

    PARTS = ("gate_proj", "up_proj", "down_proj")
    gate_proj: Tensor  # missing if the experts have no gate
    up_proj: Tensor
    down_proj: Tensor

    def __init__(
        self,
        weights: Sequence[PackedRows],
        activation: int,
        num_threads: int,
        biases: Sequence[Tensor] = (),
        clamp: Sequence[float] = (),
    ) -> None:
        """Register ``weights`` (gate if the experts have one, up, down) and their ``biases`` (three or none).

        ``activation`` is 0 for SiLU, 1 for tanh-approximated GELU, 2 for squared ReLU without a gate. ``clamp`` is
        empty or (limit, alpha), see ``native.portable.clamped_gate``.
        """
        super().__init__()
        self.clamp = list(clamp)
        register_biases(self, biases)
        self.formats = [weight.format for weight in weights]
        self.inner_features = weights[-1].num_inputs
        self.activation, self.num_threads = activation, num_threads
        self.parts = self.PARTS[-len(weights) :]
        for name, weight in zip(self.parts, weights, strict=True):
            self.register_buffer(name, weight.packed)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums [W, H] of the outputs of each row's experts.

        ``hidden_states`` are [W, H], ``top_k_index`` [W, K] int64 the expert ids, and ``top_k_weights`` [W, K] the
        factors of the experts' outputs.
        """
        output: Tensor = torch.ops.yggdrasil.quantised_experts(
            hidden_states, top_k_index, top_k_weights, [getattr(self, part) for part in self.parts], self.formats,
            registered_biases(self), self.inner_features, self.activation, self.clamp, self.num_threads,
        )  # fmt: skip
        return output


class QuantisedEmbedding(nn.Module):
    """``nn.Embedding`` with a quantised weight, for outputs in ``dtype``; a tied LM head shares ``packed``."""

    packed: Tensor

    def __init__(self, weight: PackedRows, dtype: torch.dtype) -> None:
        super().__init__()
        self.format, self.num_embeddings, self.embedding_dim, packed = weight
        self.dtype = dtype
        self.register_buffer("packed", packed)

    @property
    def weight(self) -> Tensor:
        """The packed bytes, [n] uint8: models such as Llama 4 move token ids to the device of ``weight``."""
        return self.packed

    def forward(self, ids: Tensor) -> Tensor:  # [...] -> [..., K]
        """Return the embeddings [..., K] of the token ids [...], dequantised."""
        output: Tensor = torch.ops.yggdrasil.quantised_rows(
            ids, self.packed, self.format, self.embedding_dim, self.num_embeddings, self.dtype
        )
        return output


def formats_of(model: nn.Module) -> dict[str, int]:
    """Return the GGUF type number of the weights of every quantised layer of ``model``, by the layer's name.

    Experts have one entry per weight, by the weight's name.
    """
    formats: dict[str, int] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantisedLinear | QuantisedEmbedding):
            formats[name] = layer.format
        elif isinstance(layer, QuantisedExperts):
            formats |= {f"{name}.{part}": form for part, form in zip(layer.parts, layer.formats, strict=True)}
    return formats
