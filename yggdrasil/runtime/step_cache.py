"""The adapter through which transformers' models reach a step's cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from yggdrasil.checkpoints.outline import Outline


class StepCache(Cache):
    """What a transformers model sees as its cache: hands new keys and values through untouched.

    The attention function writes them, because it alone knows the slots; recurrent layers read and write their states
    by operators (``states/operators.py``). ``layers`` stays empty on purpose: a model that asks it for lengths or masks
    is doing its own bookkeeping, and positions and masks come from the step.
    """

    def __init__(
        self,
        keys: Mapping[int, Tensor],
        values: Mapping[int, Tensor],
        offsets: Tensor,
        states: Mapping[int, Sequence[Tensor]] | None = None,
        parents: Tensor | None = None,
    ) -> None:
        """By the number of a layer: keys and values [Hkv, S, D], and its buffers as ``StateBuffers`` has them.

        ``parents`` [W] int64 are those of the step's rows, -1 behind the text; models without states need none.
        """
        super().__init__(layers=[])
        self.step_keys, self.step_values, self.offsets = keys, values, offsets
        self._states, self._parents = states or {}, parents
        self._layer = -1  # the recurrent layer that runs
        self.layers_read: set[int] = set()

    @classmethod
    def over(cls, tensors: Sequence[Tensor], outline: Outline, offsets: Tensor, tree_mask: Tensor) -> "StepCache":
        """The cache of a step over ``StaticCache.tensors``; its rows see each other by ``tree_mask`` [W, T] bool.

        T is W where the model has recurrent layers. What follows the cache's own tensors is left alone.
        """
        count = len(outline.key_heads)
        keys, values = dict(enumerate(tensors[:count])), dict(enumerate(tensors[count : 2 * count]))
        recurrence = outline.recurrence
        if recurrence is None:
            return cls(keys, values, offsets)
        each = recurrence.num_buffers
        starts = range(2 * count, 2 * count + each * len(recurrence.layers), each)
        states = {layer: tensors[start : start + each] for layer, start in zip(recurrence.layers, starts, strict=True)}
        return cls(keys, values, offsets, states, parents_of(tree_mask))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    # ==== recurrent layers: transformers' own states do not exist, so that every pass goes the same way ====

    @property
    def parents(self) -> Tensor:
        """Parents of the step's rows, [W] int64."""
        assert self._parents is not None, "a step over recurrent states has the parents of its rows"
        return self._parents

    def own_states(self) -> Sequence[Tensor]:
        """Buffers of the recurrent layer that runs."""
        return self._states[self._layer]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._layer = layer_idx
        self.layers_read.add(layer_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: object) -> Any:
        return recurrent_states

    # ==== one layer's part, for compiling a layer by itself ====

    def own_tensors(self, layer: int) -> list[Tensor]:
        """The layer's keys and values where it attends, then its states."""
        rows = [self.step_keys[layer], self.step_values[layer]] if self._attends(layer) else []
        return [*rows, *self._states.get(layer, ())]

    def shared_tensors(self) -> list[Tensor]:
        """The offsets, and the parents where there are states."""
        return [self.offsets] if self._parents is None else [self.offsets, self._parents]

    def of_layer(self, layer: int, own: Sequence[Tensor], shared: Sequence[Tensor]) -> "StepCache":
        """A cache that holds the tensors of one layer."""
        offsets, *parents = shared
        count = 2 if self._attends(layer) else 0
        rows = [{layer: tensor} for tensor in own[:count]] or [{}, {}]
        return StepCache(rows[0], rows[1], offsets, {layer: own[count:]}, parents[0] if parents else None)

    def note_call(self, layer: int) -> None:
        """Note that a layer is called with it."""
        self.layers_read.add(layer)

    def _attends(self, layer: int) -> bool:
        return self.step_keys[layer].shape[0] > 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def parents_of(tree_mask: Tensor) -> Tensor:
    """The parent of each row, [W] int64, -1 behind the text: its nearest ancestor by ``tree_mask`` [W, W] bool."""
    rows = torch.arange(1, tree_mask.shape[0] + 1, device=tree_mask.device)
    return (tree_mask.tril(-1) * rows).amax(1) - 1
