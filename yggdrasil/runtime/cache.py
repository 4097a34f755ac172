"""Cache of one text: keys and values of attention layers, states of recurrent layers.

Dims: L layers, Hkv key heads, S capacity, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import yggdrasil.native  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.checkpoints.model_sizes import ModelSizes
from yggdrasil.checkpoints.packable import release
from yggdrasil.native.arena import Arena
from yggdrasil.runtime.states.buffers import StateBuffers


@dataclass(frozen=True)
class StaticCache:
    """KV cache with static shapes; slot i holds the keys and values of position i of the committed text.

    Slots after the committed text hold the nodes of the current tree, until ``commit`` moves accepted ones to
    consecutive slots. Layers without attention have tensors with 0 heads.
    """

    keys: list[Tensor]  # L x [Hkv, S, D]
    values: list[Tensor]  # L x [Hkv, S, D]
    states: StateBuffers | None = None
    arena: Arena | None = None  # allocator of ``keys`` and ``values`` on a CPU

    @classmethod
    def allocate(
        cls,
        sizes: ModelSizes,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        widest: int | None = None,
        *,
        is_sparse: bool = False,
    ) -> "StaticCache":
        """Allocate a KV cache of zeros for ``capacity`` positions, and buffers for the states of recurrent layers.

        Args:
            sizes: the model's sizes.
            widest: the most rows of a pass over recurrent layers; None means ``capacity``.
            is_sparse: use small memory pages until ``use_huge_pages`` is called; no effect on a GPU.
        """
        shapes = [(heads, capacity, size) for heads, size in sizes.key_heads]
        arena = Arena(is_sparse=is_sparse)

        def zeros(shape: tuple[int, int, int]) -> Tensor:
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            return arena.zeros(shape, dtype)

        recurrence = sizes.recurrence
        states = None if recurrence is None else StateBuffers.allocate(recurrence, widest or capacity, dtype, device)
        return cls([zeros(shape) for shape in shapes], [zeros(shape) for shape in shapes], states, arena)

    @property
    def capacity(self) -> int:
        """S, the number of positions whose keys and values fit in the cache."""
        return self.keys[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all ``tensors``, whether their memory is resident or not."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all buffers in the order in which steps take them.

        The order is: the keys of every layer, the values of every layer, ``StateBuffers.tensors``.
        """
        return [*self.keys, *self.values, *(self.states.tensors() if self.states is not None else ())]

    def of_layer(self, layer: int) -> list[Tensor]:
        """Return a layer's buffers: keys and values if it attends, then ``StateBuffers.of_layer`` if it recurs."""
        rows = [self.keys[layer], self.values[layer]] if self.keys[layer].shape[0] else []
        states = self.states
        return rows if states is None or layer not in states.layers else [*rows, *states.of_layer(layer)]

    def use_huge_pages(self) -> None:
        """Move keys and values to huge memory pages: reads get faster, but a short text takes more memory."""
        if self.arena is not None:
            self.arena.use_huge_pages()

    def resident_bytes(self, num_rows: int) -> int:
        """Return the bytes that keys and values of a text of ``num_rows`` tokens take, in whole memory pages."""
        total = 0
        for each in self.rows():
            heads, capacity, size = each.shape
            row, page = size * each.element_size(), 1 if self.arena is None else self.arena.page
            total += heads * min(-(-num_rows * row // page) * page, capacity * row)
        return total

    def release_slots_from(self, first: int) -> None:
        """Give the memory of the cache slots from index ``first`` on back to the system, in whole memory pages.

        Slots on these pages then read as zeros. Slots on a page shared with earlier slots keep their values. On a GPU
        nothing happens.
        """
        if self.arena is None or self.keys[0].device.type != "cpu":
            return
        if first == 0:  # after the first use was timed: huge pages that heads share are returned too
            self.arena.clear()
        else:
            for each in self.rows():
                for head in each:
                    release(head[first:], self.arena.page)

    def rows(self) -> list[Tensor]:
        """Return the key buffers, then the value buffers, [Hkv, S, D] each, of the layers with attention."""
        return [rows for rows in (*self.keys, *self.values) if rows.shape[0]]

    def commit(self, sources: Sequence[int], destination: int) -> None:
        """Move the keys and values in slots ``sources`` to consecutive slots from ``destination`` on, in every layer.

        ``sources`` must ascend, and every source slot must be equal to its new slot or after it.
        """
        torch.ops.yggdrasil.move_rows.default(self.rows(), sources, destination)
