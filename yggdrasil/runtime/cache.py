"""The static key-value cache of one model.

Dims: L layers, Hkv key heads, S capacity, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import yggdrasil.native  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.native.arena import Arena


@dataclass(frozen=True)
class StaticCache:
    """Keys and values of every layer, allocated once; slot i holds position i of the committed text.

    Slots from the committed length on are scratch for the tree's nodes until ``commit`` moves accepted rows down.
    """

    keys: list[Tensor]  # L x [Hkv, S, D]
    values: list[Tensor]  # L x [Hkv, S, D]

    @classmethod
    def allocate(
        cls, key_heads: Sequence[tuple[int, int]], capacity: int, dtype: torch.dtype, device: torch.device
    ) -> "StaticCache":
        """Zeroed buffers for ``capacity`` slots; ``key_heads`` are (heads, head size) of every layer."""
        shapes = [(heads, capacity, size) for heads, size in key_heads]
        arena = Arena()

        def zeros(shape: tuple[int, int, int]) -> Tensor:
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            return arena.zeros(shape, dtype)

        return cls([zeros(shape) for shape in shapes], [zeros(shape) for shape in shapes])

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def tensors(self) -> list[Tensor]:
        """All buffers, keys before values: the order in which steps take them."""
        return [*self.keys, *self.values]

    def commit(self, sources: Sequence[int], destination: int) -> None:
        """Move the rows in slots ``sources`` (ascending) to ``destination`` and the slots after it, in every layer."""
        torch.ops.yggdrasil.move_rows.default(self.tensors(), sources, destination)
