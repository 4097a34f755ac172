"""Bytecode of decoder layers: stages over numbered tensors, as ``native/layers/program_code.h`` defines them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from yggdrasil.runtime.native_steps.packed import Linear

_LINEARS, _ATTENTION, _NORM, _CONVOLUTION, _RECURRENCE, _EXPERTS = range(6)  # stage kinds
NOTHING = -1  # tensor number of an absent operand
# Tensor numbers common to all layers: hidden states, then the step's inputs. Cosines and sines follow, then the parents
# of rows if there are recurrent layers.
CARRIED, MASK, OFFSETS, FIRST_TURN = 0, 1, 2, 3


class Writer:
    """Writer of one decoder layer's bytecode: integers that describe the layer's stages to the native library.

    Operands are tensor numbers: 0 for the hidden states, then the ``num_shared`` inputs that all layers of a step
    share, the layer's tensors (``own``) in the order of ``tensor`` calls, and the outputs of stages. While writing,
    output n is numbered -2 - n, since the size of ``own`` is not yet known; ``code`` replaces these numbers.
    """

    def __init__(self, num_shared: int) -> None:
        self.own: list[Tensor] = []
        self._first_own = 1 + num_shared
        self._code: list[int] = []
        self._given: set[int] = set()  # indices in ``_code`` that may hold the number of a stage's output
        self._num_outputs = 0
        self.numbers: list[float] = []  # float parameters, three per stage

    def tensor(self, tensor: Tensor | None) -> int:
        """Add a tensor that the layer's bytecode uses, and return its tensor number; ``NOTHING`` (-1) for None."""
        if tensor is None:
            return NOTHING
        self.own.append(tensor)
        return self._first_own + len(self.own) - 1

    def code(self) -> list[int]:
        """Return the finished bytecode of the layer.

        The provisional numbers of stage outputs (-2, -3 and so on) are replaced by tensor numbers, which begin after
        the tensor numbers of ``own``.
        """
        first = self._first_own + len(self.own)
        return [
            first - 2 - value if place in self._given and value < NOTHING else value
            for place, value in enumerate(self._code)
        ]

    def _add(self, values: Sequence[int], plain: Sequence[int] = ()) -> None:
        """Append tensor numbers ``values``, which may be stage outputs (below -1), then plain integers."""
        self._given.update(range(len(self._code), len(self._code) + len(values)))
        self._code += [*values, *plain]

    def _give(self) -> int:
        """Return the provisional number of the next stage output."""
        self._num_outputs += 1
        return -1 - self._num_outputs

    def linears(  # noqa: PLR0913  (fused operations of linear layers)
        self,
        source: int,
        layers: Sequence[Linear],
        *,
        norm: Tensor | None = None,
        norm_kind: int = 0,
        eps: float = 0.0,
        gate: int = NOTHING,
        activation: int = 0,
        residual: int = NOTHING,
        scale: float = 1.0,
    ) -> list[int]:
        """Write the bytecode of linear layers over one input; return the tensor number of each output, in order.

        Args:
            source: tensor number of the input.
            norm: weight of an RMS norm of the input; None means no norm. ``norm_kind`` is ``kind`` of ``Writer.norm``.
            gate: tensor number of a gate: the input is multiplied by the gate's activation; ``NOTHING`` means no gate.
            activation: the gate's activation: 0 SiLU, 1 tanh-approximated GELU, 2 ReLU (squared ReLU if the gate is
                the input itself).
            residual: number of a tensor that is added to the outputs; ``NOTHING`` means no addition.
            scale: factor of the outputs before the addition.
        """
        given: dict[int, int] = {}
        for is_quantised in (True, False):
            chosen = [i for i, layer in enumerate(layers) if (layer.format >= 0) == is_quantised]
            if not chosen:
                continue
            self._code.append(_LINEARS)
            self._add([source, gate], [activation])
            self._add([self.tensor(norm)], [norm_kind])
            self._add([residual], [len(chosen)])
            for i in chosen:
                layer = layers[i]
                self._add([self.tensor(layer.packed), self.tensor(layer.bias)], [layer.outputs, layer.format])
                given[i] = self._give()
            self.numbers += [eps, scale, 0.0]
        return [given[i] for i in range(len(layers))]

    def norm(self, source: int, weight: Tensor, kind: int, eps: float, residual: int = NOTHING) -> int:
        """Write the bytecode of an RMS norm of tensor number ``source``; return the tensor number of its output.

        Args:
            weight: the norm's weight.
            kind: how the weight is applied: 0 after rounding to the rows' dtype, 1 as (1 + weight) in float32, 2 in
                float32.
            residual: number of a tensor that is added to the output; ``NOTHING`` means no addition.
        """
        self._code.append(_NORM)
        self._add([source, self.tensor(weight)], [kind])
        self._add([residual])
        self.numbers += [eps, 0.0, 0.0]
        return self._give()

    def attention(self, values: Sequence[int], plain: Sequence[int], numbers: Sequence[float]) -> int:
        """Write the bytecode of tree attention, and return the tensor number of its output.

        Args:
            values: tensor numbers: queries, keys, values, norms of query and key heads, cosines and sines, the key and
                value caches, sinks, offsets, mask.
            plain: the window, ``NormKind``, the kind of rotary embedding (``Turn``), and whether queries have gates (0
                or 1).
            numbers: the norms' eps, the scale of scores and their softcap.
        """
        return self._stage(_ATTENTION, values, plain, numbers)

    def convolution(self, values: Sequence[int], *, is_silu: bool = False) -> int:
        """Write the bytecode of a causal convolution along a tree's paths; return the tensor number of its output.

        Args:
            values: tensor numbers: inputs, factor of the inputs, factor of the output (after SiLU), weight, bias,
                window, the buffer of inputs, offsets, parents. ``NOTHING`` omits a factor.
            is_silu: apply SiLU to the output.
        """
        return self._stage(_CONVOLUTION, values, [int(is_silu)], [0.0] * 3)

    def recurrence(self, values: Sequence[int], numbers: Sequence[float], *, is_normed_first: bool = False) -> int:
        """Write the bytecode of a recurrence (gated delta network or Mamba-2) and its norm; return its output's number.

        Args:
            values: tensor numbers: convolved inputs, decays, strengths, gate, bias, rates, skip weights, norm, state,
                the buffers of decays and strengths, offsets, parents.
            numbers: the norm's eps, and the least and greatest time step.
            is_normed_first: apply the norm before the gate.
        """
        return self._stage(_RECURRENCE, values, [int(is_normed_first)], numbers)

    def experts(
        self,
        values: Sequence[int],
        plain: Sequence[int],
        packed: Sequence[int],
        formats: Sequence[int],
        numbers: Sequence[float],
    ) -> int:
        """Write the bytecode of a mixture of experts, and return the tensor number of its output.

        Args:
            values: tensor numbers: rows, the router's logits and correction, input of the shared experts' last layer
                and its gate (the input is multiplied in place by the gate's sigmoid; ``NOTHING`` for both without such
                a gate), residual.
            plain: the router's rule (0 softmax, 1 sigmoid, 2 sigmoid in float32), whether a row's shares are scaled to
                the sum 1, the number of experts of a row, the experts' intermediate size, and the activation's number.
            packed: tensor numbers of the experts' gate, up and down, then of their biases.
            formats: GGUF type numbers of gate, up and down; -1 if not quantised.
            numbers: factor of the experts' sum, limit and alpha of a clamped gate (both 0 if it is not clamped).
        """
        return self._stage(_EXPERTS, values, [*plain, *packed, *formats], numbers)

    def _stage(self, kind: int, values: Sequence[int], plain: Sequence[int], numbers: Sequence[float]) -> int:
        self._code.append(kind)
        self._add(values, plain)
        self.numbers += numbers
        return self._give()


class Program(NamedTuple):
    """The bytecode of one layer, the float parameters of its stages, and the tensors that only this layer uses."""

    code: list[int]
    numbers: list[float]
    own: list[Tensor]

    def kind(self) -> tuple[object, ...]:
        """Return a key that is equal for layers that can share their bytecode."""
        return tuple(self.code), tuple(self.numbers), tuple(tensor.shape[-1] for tensor in self.own)
