"""A model's memory of one text: keys and values of layers that attend, states of recurrent ones.

Dims: L layers, Hkv key heads, S capacity, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import yggdrasil.native  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.checkpoints.outline import Outline
from yggdrasil.native.arena import Arena
from yggdrasil.runtime.states.buffers import StateBuffers


@dataclass(frozen=True)
class StaticCache:
    """Allocated once; slot i of keys and values holds position i of the committed text.

    Slots from the committed length on are scratch for the tree's nodes until ``commit`` moves accepted rows down. A
    layer that does not attend has keys of no heads.
    """

    keys: list[Tensor]  # L x [Hkv, S, D]
    values: list[Tensor]  # L x [Hkv, S, D]
    states: StateBuffers | None = None

    @classmethod
    def allocate(
        cls, outline: Outline, capacity: int, dtype: torch.dtype, device: torch.device, widest: int | None = None
    ) -> "StaticCache":
        """Zeroed buffers for ``capacity`` slots; passes over recurrent layers have at most ``widest`` rows."""
        shapes = [(heads, capacity, size) for heads, size in outline.key_heads]
        arena = Arena()

        def zeros(shape: tuple[int, int, int]) -> Tensor:
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            return arena.zeros(shape, dtype)

        recurrence = outline.recurrence
        states = None if recurrence is None else StateBuffers.allocate(recurrence, widest or capacity, dtype, device)
        return cls([zeros(shape) for shape in shapes], [zeros(shape) for shape in shapes], states)

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All buffers, keys before values before states: the order in which steps take them."""
        return [*self.keys, *self.values, *(self.states.tensors() if self.states is not None else ())]

    def rows(self) -> list[Tensor]:
        """Keys, then values, of the layers that attend."""
        return [rows for rows in (*self.keys, *self.values) if rows.shape[0]]

    def commit(self, sources: Sequence[int], destination: int) -> None:
        """Move the rows in slots ``sources`` (ascending) to ``destination`` and the slots after it, in every layer."""
        torch.ops.yggdrasil.move_rows.default(self.rows(), sources, destination)
