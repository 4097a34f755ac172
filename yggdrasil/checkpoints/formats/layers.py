"""Modules over quantised weights, in the place of a model's own: names and shapes stay, the bytes read shrink.

Rows are rounded to int8 with a scale every 32 inputs before they meet the weights. The rounding is part of the
function: it depends on the row alone and is the same at every width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import yggdrasil.native  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.checkpoints.formats.rows import PackedRows


class QuantisedLinear(nn.Module):
    """``nn.Linear`` over quantised weights; inference only."""

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
        """As that of ``PackedLinear``, in the dtype of the rows."""
        return self.packed.new_empty(0, dtype=self._dtype)

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights [R, K] of ``outputs`` [R] int64 as numbers."""
        found: Tensor = torch.ops.yggdrasil.quantised_rows(
            outputs, self.packed, self.format, self.in_features, self.out_features, dtype
        )
        return found

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        output: Tensor = torch.ops.yggdrasil.quantised_linear(
            x, self.packed, self.bias, self.out_features, self.format, self.num_threads
        )
        return output


_BIASES = ("gate_bias", "up_bias", "down_bias")  # of experts


def keep_biases(experts: nn.Module, biases: Sequence[Tensor]) -> None:
    """Register the experts' biases, three or none, as buffers."""
    for name, bias in zip(_BIASES, biases, strict=bool(biases)):
        experts.register_buffer(name, bias)


def kept_biases(experts: nn.Module) -> list[Tensor]:
    """What ``keep_biases`` registered."""
    return [getattr(experts, name) for name in _BIASES if hasattr(experts, name)]


class QuantisedExperts(nn.Module):
    """A mixture's experts over quantised weights, as ``PackedExperts`` over full ones; inference only."""

    PARTS = ("gate_proj", "up_proj", "down_proj")
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor

    def __init__(
        self,
        weights: Sequence[PackedRows],
        is_gelu: bool,
        num_threads: int,
        biases: Sequence[Tensor] = (),
        clamp: Sequence[float] = (),
    ) -> None:
        """``weights`` are those of gate, up and down, ``biases`` theirs or none; ``clamp`` as the operator takes it."""
        super().__init__()
        self.clamp = list(clamp)
        keep_biases(self, biases)
        self.formats = [weight.format for weight in weights]
        self.inner_features = weights[-1].num_inputs
        self.is_gelu, self.num_threads = is_gelu, num_threads
        for name, weight in zip(self.PARTS, weights, strict=True):
            self.register_buffer(name, weight.packed)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Of rows [W, H], experts [W, K] int64 and their weights [W, K] the weighted sums [W, H]."""
        output: Tensor = torch.ops.yggdrasil.quantised_experts(
            hidden_states, top_k_index, top_k_weights, [self.gate_proj, self.up_proj, self.down_proj], self.formats,
            kept_biases(self), self.inner_features, self.is_gelu, self.clamp, self.num_threads,
        )  # fmt: skip
        return output


class QuantisedEmbedding(nn.Module):
    """``nn.Embedding`` over a quantised table; a tied head reads the same ``packed``."""

    packed: Tensor

    def __init__(self, weight: PackedRows, dtype: torch.dtype) -> None:
        super().__init__()
        self.format, self.num_embeddings, self.embedding_dim, packed = weight
        self.dtype = dtype
        self.register_buffer("packed", packed)

    def forward(self, ids: Tensor) -> Tensor:  # [...] -> [..., K]
        output: Tensor = torch.ops.yggdrasil.quantised_rows(
            ids, self.packed, self.format, self.embedding_dim, self.num_embeddings, self.dtype
        )
        return output


def formats_of(model: nn.Module) -> dict[str, int]:
    """GGUF's numbers for the formats of the quantised layers, by the layer's name; of experts, by each weight's."""
    formats: dict[str, int] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantisedLinear | QuantisedEmbedding):
            formats[name] = layer.format
        elif isinstance(layer, QuantisedExperts):
            formats |= {f"{name}.{part}": form for part, form in zip(layer.PARTS, layer.formats, strict=True)}
    return formats
