"""Replace a model's linear layers by packed ones, in place: one packed copy serves the steps of every width.

A packed layer changes neither the module tree's names nor the function; only the weights' layout in memory.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import yggdrasil.models.kernels  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.models.arena import Arena

PACKED_DTYPES = (torch.bfloat16, torch.float32)
_PAGE_OUT = 21  # MADV_PAGEOUT: the system may take the pages back; they are read from the file again if needed


class PackedLinear(nn.Module):
    """``nn.Linear`` over weights in the layout of ``yggdrasil::packed_linear``; inference only."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, num_threads: int, arena: Arena) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.num_threads = num_threads
        self.register_buffer("packed", _pack(torch.ops.yggdrasil.pack_linear, weight.detach(), arena))
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        output: Tensor = torch.ops.yggdrasil.packed_linear(
            x, self.packed, self.bias, self.out_features, self.num_threads
        )
        return output


class Int8Linear(nn.Module):
    """A linear layer over int8 weights with one scale an output, as torchao's weight-only quantisation makes them."""

    packed: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None, num_threads: int, arena: Arena) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.num_threads = num_threads
        self.register_buffer("packed", _pack(torch.ops.yggdrasil.pack_int8, values, arena))
        self.register_buffer("scales", scales.float().flatten().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        output: Tensor = torch.ops.yggdrasil.int8_linear(
            x, self.packed, self.scales, self.bias, self.out_features, self.num_threads
        )
        return output


def _pack(pack: Callable[[Tensor, Tensor], None], weight: Tensor, arena: Arena) -> Tensor:
    """``weight`` in packed layout, written straight to where steps will read it."""
    packed = arena.zeros(torch.ops.yggdrasil.packed_shape(weight), weight.dtype)
    pack(weight, packed)
    return packed


def pack_linears(model: nn.Module, num_threads: int) -> int:
    """Pack every linear layer of ``model``; returns how many. Tied embeddings keep their own (unpacked) table."""
    count, arena = 0, Arena()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = _packed(child, num_threads, arena)
            if packed is not None:
                setattr(parent, name, packed)
                count += 1
    return count


def _packed(layer: nn.Module, num_threads: int, arena: Arena) -> PackedLinear | Int8Linear | None:
    # Exact types only: a subclass (an adapted layer) computes something else.
    if type(layer) is nn.Linear and hasattr(layer.weight, "qdata"):
        values, scales = layer.weight.qdata, getattr(layer.weight, "scale")  # noqa: B009  (torchao's tensor is untyped)
        return Int8Linear(values, scales, layer.bias, num_threads, arena)
    if type(layer) is nn.Linear:
        weight = layer.weight
    elif type(layer) is Conv1D:
        weight = layer.weight.t()
    else:
        return None
    if weight.dtype not in PACKED_DTYPES or weight.device.type != "cpu" or weight.shape[1] % 2:
        return None
    packed = PackedLinear(weight, layer.bias, num_threads, arena)
    _page_out(layer.weight)
    return packed


def _page_out(weight: Tensor) -> None:
    """Give up the memory of a weight that was read from a mapped file: else a model is resident twice once packed.

    The mapping lives as long as any tensor of the checkpoint does, so dropping the tensor is not enough.
    """
    if sys.platform != "linux":
        return
    begin = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (weight.data_ptr() + weight.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _PAGE_OUT)
