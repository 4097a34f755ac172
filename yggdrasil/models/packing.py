"""Replace a model's linear layers by packed ones, in place: one packed copy serves the steps of every width.

A packed layer changes neither the module tree's names nor the function; only the weights' layout in memory.
"""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import yggdrasil.models.kernels  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.models.arena import Arena
from yggdrasil.models.pages import FilePages

PACKED_DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear(nn.Module):
    """``nn.Linear`` over weights in the layout of ``yggdrasil::packed_linear``; inference only."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, num_threads: int, arena: Arena) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.num_threads = num_threads
        self.register_buffer("packed", arena.hold(torch.ops.yggdrasil.pack_linear(weight.detach())))
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
        self.register_buffer("packed", arena.hold(torch.ops.yggdrasil.pack_int8(values)))
        self.register_buffer("scales", scales.float().flatten().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        output: Tensor = torch.ops.yggdrasil.int8_linear(
            x, self.packed, self.scales, self.bias, self.out_features, self.num_threads
        )
        return output


def pack_linears(model: nn.Module, num_threads: int) -> int:
    """Pack every linear layer of ``model``; returns how many. Tied embeddings keep their own (unpacked) table."""
    count, arena, pages = 0, Arena(), FilePages()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = _packed(child, num_threads, arena)
            if packed is not None:
                if isinstance(packed, PackedLinear):
                    pages.give_back(child.get_parameter("weight"))
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
    return PackedLinear(weight, layer.bias, num_threads, arena)
