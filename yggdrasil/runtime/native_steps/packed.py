"""Packed linear layers of a model by name.

Dims: N outputs, K inputs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

_PANEL, _QUANTISED_PANELS = 16, 32  # outputs per contiguous block of packed and of quantised weights


class NotCoveredError(Exception):
    """The model's tensors do not match its description, or have a layout that layer bytecode does not support."""


class Linear(NamedTuple):
    """A packed linear layer."""

    packed: Tensor  # the weight in the layout of the native kernels
    bias: Tensor | None  # [outputs] float32
    outputs: int  # number of outputs
    format: int  # GGUF type number; -1 if not quantised


class Weights:
    """A model's packed tensors by name."""

    def __init__(self, tensors: Mapping[str, Tensor], formats: Mapping[str, int]) -> None:
        self.tensors, self._formats = tensors, formats

    def has(self, name: str) -> bool:
        """Return whether there is a tensor ``name``, given with its suffix such as ".packed" or ".weight"."""
        return name in self.tensors

    def linear(self, name: str, outputs: int) -> Linear:
        """Return the packed linear layer ``name`` (without ".packed"), which has ``outputs`` outputs.

        Raises:
            NotCoveredError: the layer is not packed.
        """
        packed = self.tensors.get(f"{name}.packed")
        if packed is None:
            raise NotCoveredError(f"{name} is not packed")
        bias = self.tensors.get(f"{name}.bias")
        return Linear(packed, None if bias is None else bias.float(), outputs, self._formats.get(name, -1))

    def split(self, name: str, sizes: Sequence[int]) -> list[Linear]:
        """Split the packed linear layer ``name``, a concatenation of layers, into these layers, in order.

        Args:
            sizes: number of outputs of each layer.

        Raises:
            NotCoveredError: the layer is not packed, or a boundary of ``sizes`` is within a block of packed weights.
        """
        whole = self.linear(name, sum(sizes))
        step = _PANEL if whole.format < 0 else _QUANTISED_PANELS
        parts, begin = [], 0
        for size in sizes:
            if begin % step or (whole.packed.dim() == 2 and whole.format < 0):
                raise NotCoveredError(f"{name} joins layers of {list(sizes)} outputs, which packed rows cannot part")
            rows = whole.packed[begin // step : -(-(begin + size) // step)]
            bias = None if whole.bias is None else whole.bias[begin : begin + size]
            parts.append(Linear(rows, bias, size, whole.format))
            begin += size
        return parts

    def format_of(self, name: str) -> int:
        """Return the GGUF type number of the weights of layer ``name``; -1 if it is not quantised."""
        return self._formats.get(name, -1)
