"""States of recurrent layers, and the factors of the updates that the rows of a pass make to them.

A pass reads the state after the committed text. Each row stores its update as small factors instead of a whole state;
committing a path applies the updates of its rows to the state.

Dims: R recurrent layers, K taps, C channels of the convolution, M slots, Hk and Hv heads, Dk and Dv their sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.checkpoints.recurrent import Recurrence
from yggdrasil.native.portable_recurrence import apply_updates

SavedState = tuple[Tensor, ...]  # windows of all layers, then states of all layers


@dataclass(frozen=True)
class StateBuffers:
    """Static buffers. Row r of a pass that starts at position s writes its factors to slot (s + r) modulo M."""

    layers: tuple[int, ...]  # layer indices in the model, R of them
    num_slots: int  # M, the number of rows of the widest pass
    windows: list[Tensor]  # R x [K - 1, C]: the text's last inputs of the convolution, oldest first
    inputs: list[Tensor]  # R x [M, C]: inputs of the convolution of the pass's rows
    states: list[Tensor]  # R x [Hv, Dk, Dv] float32; empty if the layers only have a convolution, as are the others
    keys: list[Tensor]  # R x [M, Hk, Dk] float32
    updates: list[Tensor]  # R x [M, Hv, Dv] float32
    decays: list[Tensor]  # R x [M, Hv] float32

    @classmethod
    def allocate(cls, of: Recurrence, num_slots: int, dtype: torch.dtype, device: torch.device) -> "StateBuffers":
        """Allocate zeroed state buffers for the recurrent layers ``of``, each with its own storage."""

        def zeros(shape: tuple[int, ...], dtype: torch.dtype, *, exists: bool = True) -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in of.layers if exists]

        has_state = of.heads > 0
        return cls(
            of.layers, num_slots,
            zeros((of.conv_kernel - 1, of.conv_channels), dtype),
            zeros((num_slots, of.conv_channels), dtype),
            zeros((of.heads, of.key_size, of.value_size), torch.float32, exists=has_state),
            zeros((num_slots, of.key_heads, of.key_size), torch.float32, exists=has_state),
            zeros((num_slots, of.heads, of.value_size), torch.float32, exists=has_state),
            zeros((num_slots, of.heads), torch.float32, exists=has_state),
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Return all state buffers, layer by layer, the order in which steps take them."""
        return [tensor for layer in self.layers for tensor in self.of_layer(layer)]

    def of_layer(self, layer: int) -> list[Tensor]:
        """Return the buffers of one recurrent layer, in the order of the fields."""
        number = self.layers.index(layer)
        parts = self.windows, self.inputs, self.states, self.keys, self.updates, self.decays
        return [part[number] for part in parts if part]

    def commit(self, start: int, rows: Sequence[int], num_threads: int) -> None:
        """Update the states with the accepted ``rows`` of the pass at position ``start``, in the order of the path."""
        slots = [(start + row) % self.num_slots for row in rows]
        torch.ops.yggdrasil.commit_states.default(
            self.windows, self.inputs, self.states, self.keys, self.updates, self.decays, slots, num_threads
        )

    def commit_captured(self, start: Tensor, rows: Tensor, count: Tensor) -> None:
        """Do what ``commit`` does within a capture, where the host does not know the accepted rows.

        ``start`` [1] is the position of the pass; the first ``count`` [1] of ``rows`` [W], all int64, are accepted.
        """
        slots = (start + rows) % self.num_slots
        places = torch.arange(slots.shape[0], device=slots.device)
        for window, inputs in zip(self.windows, self.inputs, strict=True):
            past = torch.arange(window.shape[0], device=rows.device)
            window.copy_(torch.cat([window, inputs[slots]]).index_select(0, count + past))
        for state, key, update, decay in zip(self.states, self.keys, self.updates, self.decays, strict=True):
            apply_updates(state, key[slots], update[slots], decay[slots], places < count)

    def clear(self) -> None:
        """Reset the states to those of an empty text, zeros."""
        for tensor in (*self.windows, *self.states):
            tensor.zero_()

    def save(self) -> SavedState:
        """Return a copy of the text's convolution windows and states."""
        return tuple(tensor.clone() for tensor in (*self.windows, *self.states))

    def load(self, saved: SavedState) -> None:
        """Restore windows and states from a copy."""
        for tensor, before in zip((*self.windows, *self.states), saved, strict=True):
            tensor.copy_(before)


def parents_of(tree_mask: Tensor) -> Tensor:
    """Return each row's parent [W] int64, its last ancestor in ``tree_mask`` [W, W] bool; -1 if it follows the text."""
    rows = torch.arange(1, tree_mask.shape[0] + 1, device=tree_mask.device)
    return (tree_mask.tril(-1) * rows).amax(1) - 1
