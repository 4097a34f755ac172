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
    """States of all recurrent layers after the committed text, and the factors of a pass's rows, in static buffers.

    Row r of a pass that starts at position s writes its factors to slot (s + r) modulo M.
    """

    layers: tuple[int, ...]  # layer indices in the model, R of them
    num_slots: int  # M, the number of rows of the widest pass
    windows: list[Tensor]  # R x [K - 1, C]: the text's last inputs of the convolution, oldest first
    inputs: list[Tensor]  # R x [M, C]: inputs of the convolution of the pass's rows
    states: list[Tensor]  # R x [Hv, Dk, Dv] float32; empty if the layers only have a convolution, as are the others
    keys: list[Tensor]  # R x [M, Hk, Dk] float32
    updates: list[Tensor]  # R x [M, Hv, Dv] float32
    decays: list[Tensor]  # R x [M, Hv] float32

    @classmethod
    def allocate(
        cls, recurrence: Recurrence, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> "StateBuffers":
        """Allocate zeros for the states of all recurrent layers and for the factors of ``num_slots`` rows.

        ``recurrence`` has the layers' sizes. ``dtype`` is that of the convolution's inputs; the other buffers are
        float32.
        """

        def zeros(shape: tuple[int, ...], dtype: torch.dtype, *, exists: bool = True) -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in recurrence.layers if exists]

        has_state = recurrence.heads > 0
        return cls(
            recurrence.layers, num_slots,
            zeros((recurrence.conv_kernel - 1, recurrence.conv_channels), dtype),
            zeros((num_slots, recurrence.conv_channels), dtype),
            zeros((recurrence.heads, recurrence.key_size, recurrence.value_size), torch.float32, exists=has_state),
            zeros((num_slots, recurrence.key_heads, recurrence.key_size), torch.float32, exists=has_state),
            zeros((num_slots, recurrence.heads, recurrence.value_size), torch.float32, exists=has_state),
            zeros((num_slots, recurrence.heads), torch.float32, exists=has_state),
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Return the buffers of all recurrent layers, layer by layer, in the order in which steps take them."""
        return [tensor for layer in self.layers for tensor in self.of_layer(layer)]

    def of_layer(self, layer: int) -> list[Tensor]:
        """Return the buffers of the recurrent layer with this index in the model, in the order of the fields."""
        number = self.layers.index(layer)
        parts = self.windows, self.inputs, self.states, self.keys, self.updates, self.decays
        return [part[number] for part in parts if part]

    def commit(self, start: int, rows: Sequence[int], num_threads: int) -> None:
        """Update the recurrent states in place by the accepted ``rows`` of the pass that began at text index ``start``.

        ``rows`` are row numbers of the pass along a path of the tree, the root's first. A pass is committed once.
        """
        slots = [(start + row) % self.num_slots for row in rows]
        torch.ops.yggdrasil.commit_states.default(
            self.windows, self.inputs, self.states, self.keys, self.updates, self.decays, slots, num_threads
        )

    def commit_captured(self, start: Tensor, rows: Tensor, count: Tensor) -> None:
        """Update the recurrent states in place by a pass's accepted rows, within a CUDA graph.

        ``start`` [1] is the text position of the pass; the first ``count`` [1] of ``rows`` [W] are accepted, along a
        path of the tree. All are int64 tensors, since the host does not know their values.
        """
        slots = (start + rows) % self.num_slots
        places = torch.arange(slots.shape[0], device=slots.device)
        for window, inputs in zip(self.windows, self.inputs, strict=True):
            past = torch.arange(window.shape[0], device=rows.device)
            window.copy_(torch.cat([window, inputs[slots]]).index_select(0, count + past))
        for state, key, update, decay in zip(self.states, self.keys, self.updates, self.decays, strict=True):
            apply_updates(state, key[slots], update[slots], decay[slots], places < count)

    def clear(self) -> None:
        """Reset the recurrent states to those of an empty text, zeros."""
        for tensor in (*self.windows, *self.states):
            tensor.zero_()

    def save(self) -> SavedState:
        """Return a copy of the recurrent states and convolution windows after the committed text."""
        return tuple(tensor.clone() for tensor in (*self.windows, *self.states))

    def load(self, saved: SavedState) -> None:
        """Restore the recurrent states and convolution windows from a copy that ``save`` returned."""
        for tensor, before in zip((*self.windows, *self.states), saved, strict=True):
            tensor.copy_(before)


def parents_of(tree_mask: Tensor) -> Tensor:
    """Return the parent row of each of the W rows of a pass, [W] int64; -1 for a row that has none.

    ``tree_mask`` [W, W] bool: whether row i attends to row j. It usually attends to itself too, which is ignored. The
    rows before i that it attends to are its ancestors in the tree, and the last of them is its parent.
    """
    rows = torch.arange(1, tree_mask.shape[0] + 1, device=tree_mask.device)
    # NOTE: no ``tril``, whose OpenMP threads wait awake after it and slow down the native threads of the pass.
    return ((tree_mask & (rows < rows[:, None])) * rows).amax(1) - 1
