"""Modules over quantised weights, in the place of a model's own: names and shapes stay, the bytes read shrink.

Rows are rounded to int8 with a scale every 32 inputs before they meet the weights. The rounding is part of the
function: it depends on the row alone and is the same at every width.
"""

import torch
from torch import Tensor, nn

import yggdrasil.models.kernels  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.models.formats.rows import PackedRows


class QuantisedLinear(nn.Module):
    """``nn.Linear`` over quantised weights; inference only."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: PackedRows, bias: Tensor | None, num_threads: int) -> None:
        super().__init__()
        self.format, self.out_features, self.in_features, packed = weight
        self.num_threads = num_threads
        self.register_buffer("packed", packed)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        output: Tensor = torch.ops.yggdrasil.quantised_linear(
            x, self.packed, self.bias, self.out_features, self.format, self.num_threads
        )
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
