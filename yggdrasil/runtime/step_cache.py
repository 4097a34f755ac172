"""The adapter through which transformers' models reach a step's cache."""

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache


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
