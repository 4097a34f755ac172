"""Join linear layers that read the same input, for GPUs: query, key and value projections, and gate and up projections.

One product over the joined weights reads them at a higher rate than two or three products, and takes fewer launches.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.checkpoints.formats.layers import QuantisedLinear
from yggdrasil.checkpoints.formats.rows import PackedRows

_GROUPS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # children of a module, in the order of their calls


class FusedLinear(nn.Module):
    """A linear layer with the joined weights of several layers, which replaces the first of them.

    A ``FusedPart`` replaces each other layer. The first call with an input tensor computes the outputs of all layers,
    and a call of another part with the same tensor returns its output from these. The call of the last part drops them.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()  # ``layers`` are ``nn.Linear`` or ``QuantisedLinear``
        self.layer = _concatenated(layers)
        self._sizes = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: Sequence[Tensor] = ()

    @property
    def weight(self) -> Tensor:
        """The joined weight of all layers, empty if quantised; some models read its dtype or device."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N of the first layer]
        """Apply the first joined layer to ``x`` [..., K], and return [..., N]."""
        return self.part(x, 0)

    def part(self, x: Tensor, number: int) -> Tensor:
        """Apply joined layer ``number`` (0: the first) to ``x`` [..., K]; the result is a view of all outputs."""
        if self._input is not x:
            self._input, self._outputs = x, self.layer(x).split(self._sizes, -1)
        output = self._outputs[number]
        if number == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output


class FusedPart(nn.Module):
    """A layer, other than the first, whose weights a ``FusedLinear`` has joined and holds."""

    def __init__(self, fused: FusedLinear, number: int) -> None:
        super().__init__()
        self._fused, self._number = [fused], number  # a list, so that ``fused`` is no submodule here

    @property
    def weight(self) -> Tensor:
        """The joined weight of all layers, empty if quantised; some models read its dtype or device."""
        return self._fused[0].weight

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        """Apply the layer to ``x`` [..., K], and return [..., N]."""
        return self._fused[0].part(x, self._number)


def fuse_linears(model: nn.Module) -> None:
    """Join the linear layers of each attention and MLP of ``model`` that read the same input, in place.

    Weights keep their device. While the layers of a module are joined, memory holds their weights twice. Layers that
    differ in class, format or dtype, or of which only some have a bias, are not joined.
    """
    # Names and not layers: a list of layers would keep their weights in memory.
    places = [(module, names) for module in model.modules() for names in _GROUPS if hasattr(module, names[0])]
    for module, names in places:
        layers: list[Any] = [getattr(module, name, None) for name in names]
        if _are_alike(layers):
            fused = FusedLinear(layers)
            for number, name in enumerate(names):
                setattr(module, name, FusedPart(fused, number) if number else fused)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # blocks of the former weights are too small for the new ones


def _are_alike(layers: Sequence[Any]) -> bool:
    """Return whether ``layers`` are linear layers whose weights can be joined into one layer."""
    if all(type(layer) is nn.Linear for layer in layers):
        facts = {(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}
    elif all(isinstance(layer, QuantisedLinear) for layer in layers):
        facts = {(layer.in_features, layer.bias is None, layer.format) for layer in layers}
    else:
        return False
    return len(facts) == 1


def _concatenated(layers: Sequence[Any]) -> nn.Linear | QuantisedLinear:
    """Return one layer that gives the concatenated outputs of ``layers``."""
    first, num_outputs = layers[0], sum(layer.out_features for layer in layers)
    bias = None if first.bias is None else torch.cat([layer.bias.detach() for layer in layers])
    if isinstance(first, QuantisedLinear):
        packed = torch.cat([layer.packed for layer in layers])
        rows = PackedRows(first.format, num_outputs, first.in_features, packed)
        return QuantisedLinear(rows, bias, first.num_threads, first.weight.dtype)
    fused = nn.Linear(first.in_features, num_outputs, bias=bias is not None, device="meta")
    fused.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
    if bias is not None:
        fused.bias = nn.Parameter(bias, requires_grad=False)
    return fused
