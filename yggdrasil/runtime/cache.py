"""The static key-value cache of one model, and the adapter through which transformers models reach it.

Dims: L layers, Hkv key heads, S capacity, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

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


class StepCache(Cache):
    """What a transformers model sees as its cache: hands new keys and values through untouched.

    The attention function writes them, because it alone knows the slots. ``layers`` stays empty on purpose: a model
    that asks it for lengths or masks is doing its own bookkeeping, and positions and masks come from the step.
    """

    def __init__(
        self, keys: Sequence[Tensor] | dict[int, Tensor], values: Sequence[Tensor] | dict[int, Tensor], offsets: Tensor
    ) -> None:
        super().__init__(layers=[])
        self.step_keys, self.step_values, self.offsets = keys, values, offsets
        self.layers_attended = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    # ==== one layer's part, for compiling a layer by itself ====

    def own_tensors(self, layer: int) -> list[Tensor]:
        """The layer's keys and values."""
        return [self.step_keys[layer], self.step_values[layer]]

    def shared_tensors(self) -> list[Tensor]:
        """The offsets."""
        return [self.offsets]

    def of_layer(self, layer: int, own: Sequence[Tensor], shared: Sequence[Tensor]) -> "StepCache":
        """A cache that holds the keys and values of one layer."""
        (offsets,), (keys, values) = shared, own
        return StepCache({layer: keys}, {layer: values}, offsets)

    def note_call(self) -> None:
        """Count a layer that attends."""
        self.layers_attended += 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
