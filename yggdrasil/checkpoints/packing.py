"""Replaces a model's linear layers and experts, in place, by modules with packed weights.

One packed copy serves the steps of all widths. Packing keeps the names of modules. Without quantisation it changes only
the layout of the weights in memory.
"""

from typing import Any

import torch
from torch import Tensor, nn

import yggdrasil.native  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.checkpoints.experts import expert_parts, form_of, pack_experts
from yggdrasil.checkpoints.formats.layers import QuantisedEmbedding, QuantisedLinear
from yggdrasil.checkpoints.formats.rows import PackedRows, Quantise
from yggdrasil.checkpoints.packable import is_packable, page_out
from yggdrasil.native.arena import Arena

_CPU = torch.device("cpu")


class PackedLinear(nn.Module):
    """``nn.Linear`` with unquantised weights in the layout of ``yggdrasil::packed_linear``; inference only."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, num_threads: int, arena: Arena) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.num_threads = num_threads
        packed = arena.zeros(torch.ops.yggdrasil.packed_shape(weight), weight.dtype)
        torch.ops.yggdrasil.pack_linear(weight.detach(), packed)
        self.register_buffer("packed", packed)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def over(cls, packed: Tensor, bias: Tensor | None, shape: tuple[int, int], num_threads: int) -> "PackedLinear":
        """Return a linear layer of ``shape`` (N, K) over the tensor ``packed``, which it shares with another layer."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        (layer.out_features, layer.in_features), layer.num_threads = shape, num_threads
        layer.register_buffer("packed", packed)
        layer.register_buffer("bias", None if bias is None else bias.detach())
        return layer

    @property
    def weight(self) -> Tensor:
        """Return an empty tensor with the weights' dtype and device. Some models cast a layer's input to these."""
        return self.packed.new_empty(0)

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the exact weight rows [R, K] of the outputs numbered ``outputs`` [R] int64."""
        if self.packed.dim() == 2:  # the layout of portable operators
            return self.packed[outputs]
        lanes = self.packed.shape[2]
        found = self.packed[outputs // lanes, :, outputs % lanes]  # bfloat16 is stored in pairs of inputs
        return found.flatten(1)[:, : self.in_features].contiguous()

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        """Apply the packed linear layer to ``x`` [..., K], and return [..., N]."""
        output: Tensor = torch.ops.yggdrasil.packed_linear(
            x, self.packed, self.bias, self.out_features, self.num_threads
        )
        return output


def pack_linears(
    model: nn.Module, num_threads: int, quantise: Quantise | None = None, device: torch.device = _CPU
) -> None:
    """Replace the linear layers and experts of ``model``, which is on a CPU, by packed modules on ``device``, in place.

    Embeddings, and on a GPU linear layers and experts too, are replaced only if they are quantised. A quantised weight
    shared by embedding and LM head is packed once; otherwise a tied embedding stays unpacked.

    Args:
        num_threads: threads of each packed layer.
        quantise: function that returns the quantised rows of a weight, or None to keep the weight unquantised. None
            quantises no weight.

    Raises:
        YggdrasilError: ``device`` is a GPU, and the model has a format without a GPU kernel.
    """
    packer = _Packer(num_threads, quantise or (lambda name, weight: None), device)
    for name, child in list(model.named_modules(remove_duplicate=False)):
        packed = packer.packed(name, child)
        if packed is not None:
            model.set_submodule(name, packed)


def weights_of(name: str, module: Any) -> tuple[str, ...]:
    """Return the weight names of the layer ``name`` if it is linear, an embedding or experts; otherwise ()."""
    if type(module) in (nn.Embedding, nn.Linear):
        return (f"{name}.weight",)
    form = form_of(module)
    return () if form is None else tuple(expert_parts(name, module, form))


def _is_transposed(module: nn.Module) -> bool:
    """Return whether ``module`` is transformers' Conv1D, a linear layer stored transposed, without importing it."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


class _Packer:
    """Build packed modules whose weights share one arena."""

    def __init__(self, num_threads: int, quantise: Quantise, device: torch.device) -> None:
        self._num_threads, self._device = num_threads, device
        self._quantise = quantise
        self._arena = Arena()
        self._quantised: dict[int, PackedRows] = {}  # by address of the weight

    def packed(self, name: str, module: nn.Module) -> nn.Module | None:
        """Return the module with packed weights that replaces ``module``, or None to keep ``module``.

        The memory of replaced weights that view a file is given back to the system.

        Raises:
            YggdrasilError: the device is a GPU, and ``module`` has a format without a GPU kernel.
        """
        # Exact types only: a subclass (an adapted layer, a scaled embedding) may compute something else.
        if type(module) is nn.Embedding:
            found = self._quantised_weight(name, module.weight, module.weight)
            return None if found is None else QuantisedEmbedding(found, module.weight.dtype)
        if type(module) is not nn.Linear and not _is_transposed(module):
            return pack_experts(name, module, self._num_threads, self._arena, self._quantise, self._device)
        layer: Any = module
        weight: Tensor = layer.weight.t() if _is_transposed(module) else layer.weight
        if not is_packable(weight):
            return None
        found = self._quantised_weight(name, layer.weight, weight)
        packed: nn.Module
        if found is not None:
            packed = QuantisedLinear(found, layer.bias, self._num_threads, weight.dtype)
        elif weight.shape[1] % 2 == 0 and self._device.type == "cpu":
            packed = PackedLinear(weight, layer.bias, self._num_threads, self._arena)
        else:
            return None
        page_out(layer.weight)
        return packed

    def _quantised_weight(self, name: str, parameter: Tensor, weight: Tensor) -> PackedRows | None:
        """Return the packed quantised rows of ``weight`` [N, K], or None if it is not quantised.

        ``weight`` is a view of ``parameter``. A parameter that several modules share is packed once.
        """
        place = parameter.data_ptr()
        if place not in self._quantised:
            rows = self._quantise(f"{name}.weight", weight)
            if rows is None:
                return None
            is_here = self._device.type == "cpu"
            self._quantised[place] = rows.pack(self._arena) if is_here else rows.on_gpu(self._device)
        return self._quantised[place]
