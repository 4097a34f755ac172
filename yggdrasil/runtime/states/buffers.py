"""States of recurrent layers, and the factors from which the rows of a pass update them.

A pass reads the state after the committed text. Each row stores small factors of its update instead of a whole state:
the input of the convolution, the decay, and the strength of the update. Committing a path of the tree computes the keys
and values of its rows again from the stored inputs, and applies the rows' updates to the state.

Dims: R recurrent layers, K taps, C channels of the convolution, M slots; Hk key and Hv value heads of size Dk and Dv.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.checkpoints.recurrent import GATED_DELTA, Recurrence
from yggdrasil.errors import YggdrasilError
from yggdrasil.native.portable_recurrence import apply_path

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
    states: list[Tensor]  # R x [Hv, Dk, Dv] float32; this and later lists are empty for layers with only a convolution
    decays: list[Tensor]  # R x [M, Hv] float32, logarithms
    strengths: list[Tensor]  # R x [M, Hv] float32: factors of the updates
    taps: list[Tensor]  # R x [K, C] float32: the convolution's weight, which commits need
    biases: list[Tensor]  # R x [C] float32
    is_delta: bool  # whether the layers are gated delta networks

    @classmethod
    def allocate(
        cls, recurrence: Recurrence, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> "StateBuffers":
        """Allocate zeros for the states of all recurrent layers and for the factors of ``num_slots`` rows.

        Args:
            recurrence: the recurrent layers and their sizes.
            dtype: dtype of the convolutions' windows and inputs; the other buffers are float32.
        """

        def zeros(shape: tuple[int, ...], dtype: torch.dtype, *, exists: bool = True) -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in recurrence.layers if exists]

        has_state = recurrence.heads > 0
        return cls(
            recurrence.layers, num_slots,
            zeros((recurrence.conv_kernel - 1, recurrence.conv_channels), dtype),
            zeros((num_slots, recurrence.conv_channels), dtype),
            zeros((recurrence.heads, recurrence.key_size, recurrence.value_size), torch.float32, exists=has_state),
            zeros((num_slots, recurrence.heads), torch.float32, exists=has_state),
            zeros((num_slots, recurrence.heads), torch.float32, exists=has_state),
            zeros((recurrence.conv_kernel, recurrence.conv_channels), torch.float32, exists=has_state),
            zeros((recurrence.conv_channels,), torch.float32, exists=has_state),
            recurrence.kind == GATED_DELTA,
        )  # fmt: skip

    def read_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weights of the layers' convolutions, which commits need, from a model's ``tensors`` by name.

        Nothing is copied for layers with only a convolution.

        Raises:
            YggdrasilError: a layer has no convolution called "conv1d".
        """
        for layer, taps, bias in zip(self.layers, self.taps, self.biases, strict=False):
            name = next((name for name in tensors if f".{layer}." in name and name.endswith("conv1d.weight")), None)
            if name is None:
                raise YggdrasilError(f"the recurrent layer {layer} has no convolution called conv1d")
            own_bias = tensors.get(f"{name.removesuffix('weight')}bias")
            self.set_weights(taps, bias, tensors[name].flatten(1).t(), own_bias)

    @staticmethod
    @torch.no_grad()
    def set_weights(taps: Tensor, bias: Tensor, weight: Tensor, own_bias: Tensor | None) -> None:
        """Write a convolution's ``weight`` [K, C] to ``taps``, and its bias ``own_bias`` [C] to ``bias``.

        If ``own_bias`` is None, ``bias`` keeps its values.
        """
        taps.copy_(weight)
        if own_bias is not None:
            bias.copy_(own_bias)

    def tensors(self) -> list[Tensor]:
        """Return the buffers that steps take, layer by layer: window, inputs and, if any, state, decays, strengths."""
        count = 5 if self.states else 2
        return [tensor for layer in self.layers for tensor in self.of_layer(layer)[:count]]

    def of_layer(self, layer: int) -> list[Tensor]:
        """Return the buffers of the recurrent layer with this index in the model.

        They are window and inputs and, unless the layer has only a convolution, state, decays, strengths, taps, biases.
        """
        number = self.layers.index(layer)
        parts = self.windows, self.inputs, self.states, self.decays, self.strengths, self.taps, self.biases
        return [part[number] for part in parts if part]

    def commit(self, start: int, rows: Sequence[int], num_threads: int) -> None:
        """Apply the updates of the last pass's accepted ``rows`` to the recurrent states, in place.

        Call it at most once per pass.

        Args:
            start: number of committed tokens before the pass.
            rows: row indices of the pass along a path of the tree, the root's first.
        """
        slots = [(start + row) % self.num_slots for row in rows]
        torch.ops.yggdrasil.commit_states.default(
            self.windows, self.inputs, self.states, self.decays, self.strengths, self.taps, self.biases, self.is_delta,
            slots, num_threads,
        )  # fmt: skip

    def commit_captured(self, start: Tensor, rows: Tensor, count: Tensor) -> None:
        """Apply the updates of a pass's accepted rows to the recurrent states, in place, within a CUDA graph.

        All arguments are int64 tensors, since the host does not know their values.

        Args:
            start: [1], number of committed tokens before the pass.
            rows: [W] row indices of the pass; the first ``count`` are accepted, along a path of the tree.
            count: [1], number of accepted rows.
        """
        slots = (start + rows) % self.num_slots
        places = torch.arange(slots.shape[0], device=slots.device)
        for layer in self.layers:
            window, inputs, *state = self.of_layer(layer)
            seen = torch.cat([window, inputs[slots]])
            if state:
                apply_path(seen, state, slots, is_delta=self.is_delta, is_accepted=places < count)
            past = torch.arange(window.shape[0], device=rows.device)
            window.copy_(seen.index_select(0, count + past))

    def clear(self) -> None:
        """Reset the recurrent states to those of an empty text, zeros."""
        for tensor in (*self.windows, *self.states):
            tensor.zero_()

    def save(self) -> SavedState:
        """Return copies of the convolution windows of all layers, then of their states."""
        return tuple(tensor.clone() for tensor in (*self.windows, *self.states))

    def load(self, saved: SavedState) -> None:
        """Restore the recurrent states and convolution windows from a copy that ``save`` returned."""
        for tensor, before in zip((*self.windows, *self.states), saved, strict=True):
            tensor.copy_(before)


def parents_of(tree_mask: Tensor) -> Tensor:
    """Return the parent row of each of the W rows of a pass, [W] int64; -1 for a row that has none in the pass.

    Args:
        tree_mask: [W, W] bool: whether row i attends to row j. The rows before i that row i attends to are its
            ancestors in the tree, and the last of them is its parent. Entries with j >= i are ignored.
    """
    rows = torch.arange(1, tree_mask.shape[0] + 1, device=tree_mask.device)
    # NOTE: no ``tril``, whose OpenMP threads wait awake after it and slow down the native threads of the pass.
    return ((tree_mask & (rows < rows[:, None])) * rows).amax(1) - 1
