"""Replace a model's linears and experts by packed ones, in place: one packed copy serves the steps of every width.

A packed layer changes neither the module tree's names nor the function; only the weights' layout in memory.
"""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import yggdrasil.models.kernels  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.models.arena import Arena
from yggdrasil.models.experts import pack_experts
from yggdrasil.models.formats.layers import QuantisedEmbedding, QuantisedLinear
from yggdrasil.models.formats.rows import PackedRows, Quantise
from yggdrasil.models.kernels import is_native
from yggdrasil.models.packable import is_packable, page_out

_SCREENED_BYTES = 1 << 24  # of a head; a smaller one stays in a processor's caches, and a copy would gain nothing
_PANEL, _TILE, _MOST = 16, 64, 127  # outputs of a panel, inputs of a tile, the greatest multiple that a byte holds
_PANELS_AT_ONCE = 256  # in double precision a whole head would take more memory than a model
_SURELY = 1 + 1e-6  # for what float32 takes from norms


class PackedLinear(nn.Module):
    """``nn.Linear`` over weights in the layout of ``yggdrasil::packed_linear``; inference only."""

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
        """A layer of ``shape`` [N, K] over weights that another layer packed."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        (layer.out_features, layer.in_features), layer.num_threads = shape, num_threads
        layer.register_buffer("packed", packed)
        layer.register_buffer("bias", None if bias is None else bias.detach())
        return layer

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        output: Tensor = torch.ops.yggdrasil.packed_linear(
            x, self.packed, self.bias, self.out_features, self.num_threads
        )
        return output


class ScreenedLinear(PackedLinear):
    """A head whose greatest output is found through a copy in 8 bits: most of its weights are read as that alone.

    ``copy`` [panels, K / 4, 16, 4] uint8 are the weights as multiples of a scale an output, 128 added, K filled to
    whole tiles of 64. ``factors`` [panels, 3, 16] float32 are those scales, the norms of what was lost of each output's
    weights, and of what is left.
    """

    copy: Tensor
    factors: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, num_threads: int, arena: Arena) -> None:
        super().__init__(weight, bias, num_threads, arena)
        panels, inputs = -(-self.out_features // _PANEL), -(-self.in_features // _TILE) * _TILE
        copy = arena.zeros((panels, inputs // 4, _PANEL, 4), torch.uint8)
        factors = torch.empty(panels, 3, _PANEL)
        for first in range(0, panels, _PANELS_AT_ONCE):
            some = slice(first, min(first + _PANELS_AT_ONCE, panels))
            _copy_panels(weight.detach()[some.start * _PANEL : some.stop * _PANEL], copy[some], factors[some])
        self.register_buffer("copy", copy)
        self.register_buffer("factors", factors)

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Whether the processor multiplies bytes, and the head is large enough; numbers must be finite."""
        can_screen = is_native() and torch.ops.yggdrasil.can_screen()
        return can_screen and weight.nbytes >= _SCREENED_BYTES and bool(torch.stack(weight.aminmax()).isfinite().all())

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        output: Tensor = torch.ops.yggdrasil.screened_linear(
            x, self.packed, self.bias, self.copy, self.factors, self.out_features, self.num_threads
        )
        return output


def _copy_panels(weight: Tensor, copy: Tensor, factors: Tensor) -> None:
    """Write the panels of some outputs of ``weight`` [n, K]; where a panel has no output, nothing is known of it."""
    values = weight.double()
    scale = (values.abs().amax(dim=1, keepdim=True) / _MOST).float().clamp(min=torch.finfo(torch.float32).tiny).double()
    multiples = (values / scale).round().clamp(-_MOST, _MOST)
    left = multiples * scale
    rows, inputs = copy.shape[0] * _PANEL, copy.shape[1] * 4
    filled = torch.full((rows, inputs), 128, dtype=torch.uint8)
    filled[: len(values), : values.shape[1]] = (multiples + 128).to(torch.uint8)
    copy.copy_(filled.view(-1, _PANEL, inputs // 4, 4).transpose(1, 2))
    known = torch.stack([scale[:, 0], (values - left).norm(dim=1) * _SURELY, left.norm(dim=1) * _SURELY])
    unknown = torch.tensor([[1.0], [torch.inf], [torch.inf]]).expand(3, rows - len(values))
    factors.copy_(torch.cat([known.float(), unknown], dim=1).view(3, -1, _PANEL).transpose(0, 1))


def pack_linears(
    model: nn.Module, num_threads: int, quantise: Quantise | None = None, head: nn.Module | None = None
) -> None:
    """Pack linear layers and mixtures' experts of ``model``, and embeddings where ``quantise`` gives their rows.

    A quantised table that serves two modules is packed once; else tied embeddings keep their own (unpacked) table. Of
    the ``head``, a layer of the model, often no more is wanted than the greatest output.
    """
    packer = _Packer(num_threads, quantise or (lambda name, weight: None), head)
    for name, child in list(model.named_modules(remove_duplicate=False)):
        packed = packer.packed(name, child)
        if packed is not None:
            model.set_submodule(name, packed)


class _Packer:
    """Packed modules in the place of a model's own, side by side in one arena."""

    def __init__(self, num_threads: int, quantise: Quantise, head: nn.Module | None) -> None:
        self._num_threads, self._head = num_threads, head
        self._quantise = quantise
        self._arena = Arena()
        self._quantised: dict[int, PackedRows] = {}  # by address of the weight

    def packed(self, name: str, module: nn.Module) -> nn.Module | None:
        """The module over packed weights; None for what stays as it is."""
        # Exact types only: a subclass (an adapted layer, a scaled embedding) computes something else.
        if type(module) is nn.Embedding:
            found = self._quantised_weight(name, module.weight, module.weight)
            return None if found is None else QuantisedEmbedding(found, module.weight.dtype)
        if type(module) is nn.Linear:
            weight = module.weight
        elif type(module) is Conv1D:
            weight = module.weight.t()
        else:
            return pack_experts(module, self._num_threads, self._arena)
        if not is_packable(weight):
            return None
        found = self._quantised_weight(name, module.weight, weight)
        packed: nn.Module
        if found is not None:
            packed = QuantisedLinear(found, module.bias, self._num_threads)
        elif weight.shape[1] % 2 == 0:
            kind = ScreenedLinear if module is self._head and ScreenedLinear.serves(weight) else PackedLinear
            packed = kind(weight, module.bias, self._num_threads, self._arena)
        else:
            return None
        page_out(module.weight)
        return packed

    def _quantised_weight(self, name: str, parameter: Tensor, weight: Tensor) -> PackedRows | None:
        """``weight`` [N, K] holds the values of ``parameter``, which may serve several modules."""
        place = parameter.data_ptr()
        if place not in self._quantised:
            rows = self._quantise(f"{name}.weight", weight)
            if rows is None:
                return None
            self._quantised[place] = rows.pack(self._arena)
        return self._quantised[place]
