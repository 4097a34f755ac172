"""Quantised weights in GGUF's layout (rows of blocks) and in the kernels' packed layout."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.checkpoints.formats.kinds import BLOCKS, Format
from yggdrasil.errors import YggdrasilError
from yggdrasil.native.arena import Arena
from yggdrasil.native.portable_quantised import FORMATS


class QuantisedRows(NamedTuple):
    """A quantised weight [N, K], or [E, N, K] of all experts, whose rows consist of GGUF blocks of ``format``."""

    format: Format
    blocks: Tensor  # [..., N, bytes] uint8

    @property
    def num_inputs(self) -> int:
        """Return K, the number of weights in a row."""
        block_inputs, block_bytes = BLOCKS[self.format]
        return int(self.blocks.shape[-1]) // block_bytes * block_inputs

    def on_gpu(self, device: torch.device) -> "PackedRows":
        """Copy the rows of blocks to the GPU ``device``, where kernels read the blocks unchanged.

        Raises:
            YggdrasilError: no kernel for GPUs reads the format.
        """
        if self.format not in FORMATS:
            raise YggdrasilError(f"no kernel for GPUs reads weights of {self.format.name}; take --weights full")
        return PackedRows(int(self.format), self.blocks.shape[-2], self.num_inputs, self.blocks.to(device))

    def pack(self, arena: Arena) -> "PackedRows":
        """Pack the rows of blocks into the layout of the CPU's kernels, in memory of ``arena``."""
        *experts, num_outputs, num_bytes = self.blocks.shape
        matrices = self.blocks.view(-1, num_outputs, num_bytes)
        shape = torch.ops.yggdrasil.quantised_shape(matrices[0], int(self.format), self.num_inputs)
        packed = arena.zeros((*experts, *shape), torch.uint8)
        for matrix, place in zip(matrices, packed.view(-1, *shape), strict=True):
            torch.ops.yggdrasil.pack_quantised(matrix, int(self.format), self.num_inputs, place)
        return PackedRows(int(self.format), num_outputs, self.num_inputs, packed)


class PackedRows(NamedTuple):
    """A quantised weight in the kernels' layout; on a GPU, rows of GGUF blocks [..., N, bytes]."""

    format: int  # GGUF's type number
    num_outputs: int
    num_inputs: int
    packed: Tensor  # [..., pairs of panels, bytes] uint8


Quantise = Callable[[str, Tensor], QuantisedRows | None]
"""Function (parameter name, its values [..., N, K]) -> quantised rows, or None to keep the parameter unquantised."""
