"""Adapter of a step's cache to transformers' cache interface."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from yggdrasil.checkpoints.model_sizes import ModelSizes
from yggdrasil.runtime.states.buffers import parents_of


class StepCache(Cache):
    """The cache object that a step passes to a transformers model; ``update`` returns new keys and values unchanged.

    Tree attention writes keys and values to their slots; recurrent layers read and write states by the operators of
    ``states/operators.py``. ``layers`` is empty, since positions and masks come from the step, not from the cache.
    """

    def __init__(
        self,
        keys: Mapping[int, Tensor],
        values: Mapping[int, Tensor],
        offsets: Tensor,
        states: Mapping[int, Sequence[Tensor]] | None = None,
        parents: Tensor | None = None,
    ) -> None:
        """Wrap the tensors of one step.

        Args:
            keys, values: [Hkv, S, D] by layer index.
            offsets: [2] int64: context length, first slot written.
            states: the buffers of each recurrent layer, in the order of ``StateBuffers``.
            parents: [W] int64, each row's parent row, -1 for a row that follows the committed text. None without
                recurrent layers.
        """
        super().__init__(layers=[])
        self.step_keys, self.step_values, self.offsets = keys, values, offsets
        self._states, self._parents = states or {}, parents
        self._layer = -1  # the recurrent layer that runs
        self.layers_read: set[int] = set()  # indices of the layers that used this cache

    @classmethod
    def over(cls, tensors: Sequence[Tensor], sizes: ModelSizes, offsets: Tensor, tree_mask: Tensor) -> "StepCache":
        """Return the cache object of a step over ``tensors``, a list that begins with ``StaticCache.tensors``.

        Args:
            sizes: the model's sizes.
            offsets: [2] int64: the context length and the first slot written.
            tree_mask: [W, T] bool, which gives the parents of the step's rows; T must be W with recurrent layers.
        """
        count = len(sizes.key_heads)
        keys, values = dict(enumerate(tensors[:count])), dict(enumerate(tensors[count : 2 * count]))
        recurrence = sizes.recurrence
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

    # ==== recurrent layers: transformers sees no states, so that every pass takes the same code path ====

    @property
    def parents(self) -> Tensor:
        """Parent row of each row of the step, [W] int64; -1 for a row that has none. Only with recurrent layers."""
        assert self._parents is not None, "a step over recurrent states has the parents of its rows"
        return self._parents

    def own_states(self) -> Sequence[Tensor]:
        """Return the buffers of the recurrent layer that is running, in the order of ``StateBuffers.tensors``."""
        self.layers_read.add(self._layer)
        return self._states[self._layer]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._layer = layer_idx

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False. Until transformers 5.20, mixers call it, but not ``get_conv_state``."""
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        self._layer = layer_idx
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: object) -> Any:
        return recurrent_states

    # ==== tensors of one layer, for compiling layers separately ====

    def own_tensors(self, layer: int) -> list[Tensor]:
        """Return the cache tensors of a layer: keys and values if it has attention, then its states."""
        rows = [self.step_keys[layer], self.step_values[layer]] if self._attends(layer) else []
        return [*rows, *self._states.get(layer, ())]

    def shared_tensors(self) -> list[Tensor]:
        """Return the tensors common to all layers: offsets [2] int64 and, with recurrent layers, parents [W] int64."""
        return [self.offsets] if self._parents is None else [self.offsets, self._parents]

    def of_layer(self, layer: int, own: Sequence[Tensor], shared: Sequence[Tensor]) -> "StepCache":
        """Return a cache object with the tensors of one layer.

        Args:
            own: the layer's tensors, in the order of ``own_tensors``.
            shared: the tensors common to all layers, in the order of ``shared_tensors``.
        """
        offsets, *parents = shared
        count = 2 if self._attends(layer) else 0
        rows = [{layer: tensor} for tensor in own[:count]] or [{}, {}]
        return StepCache(rows[0], rows[1], offsets, {layer: own[count:]}, parents[0] if parents else None)

    def note_call(self, layer: int) -> None:
        """Add the layer index ``layer`` to ``layers_read``, the layers that were called with this cache."""
        self.layers_read.add(layer)

    def _attends(self, layer: int) -> bool:
        return self.step_keys[layer].shape[0] > 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
