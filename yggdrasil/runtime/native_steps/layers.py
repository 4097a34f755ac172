"""Write decoder layers as bytecode over the model's tensors, and run all layers by one native call.

Dims: W rows, H hidden size, L layers, Hkv key heads, S cache capacity, D head size.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from yggdrasil.native.operators import drop_stack
from yggdrasil.runtime.native_steps.families import Description, LayerShape

_LINEARS, _ATTENTION, _NORM = 0, 1, 2  # stage kinds, as in ``native/layers/program_code.h``
_NOTHING = -1  # tensor number of an absent operand
_PANEL, _QUANTISED_PANELS = 16, 32  # outputs per contiguous block of packed and of quantised weights
CARRIED, MASK, OFFSETS, FIRST_TURN = 0, 1, 2, 3  # tensor numbers common to all layers: hidden states, then step inputs


class NotCoveredError(Exception):
    """The model's tensors do not match its description, or have a layout that layer bytecode does not support."""


class Linear(NamedTuple):
    """A packed linear layer."""

    packed: Tensor
    bias: Tensor | None  # [outputs] float32
    outputs: int
    format: int  # GGUF type number; -1: not quantised


class Weights:
    """A model's packed tensors by name."""

    def __init__(self, tensors: Mapping[str, Tensor], formats: Mapping[str, int]) -> None:
        self.tensors, self._formats = tensors, formats

    def has(self, name: str) -> bool:
        return name in self.tensors

    def linear(self, name: str, outputs: int) -> Linear:
        """Return the packed linear layer ``name``. Raises NotCoveredError if it is not packed."""
        packed = self.tensors.get(f"{name}.packed")
        if packed is None:
            raise NotCoveredError(f"{name} is not packed")
        bias = self.tensors.get(f"{name}.bias")
        return Linear(packed, None if bias is None else bias.float(), outputs, self._formats.get(name, -1))

    def joined(self, name: str, sizes: Sequence[int]) -> list[Linear]:
        """Split the linear layer ``name``, whose outputs concatenate those of several layers of ``sizes`` outputs.

        Raises NotCoveredError if a boundary is within a block of packed weights.
        """
        whole = self.linear(name, sum(sizes))
        step = _PANEL if whole.format < 0 else _QUANTISED_PANELS
        parts, begin = [], 0
        for size in sizes:
            if begin % step or (whole.packed.dim() == 2 and whole.format < 0):
                raise NotCoveredError(f"{name} joins layers of {list(sizes)} outputs, which packed rows cannot part")
            rows = whole.packed[begin // step : -(-(begin + size) // step)]
            bias = None if whole.bias is None else whole.bias[begin : begin + size]
            parts.append(Linear(rows, bias, size, whole.format))
            begin += size
        return parts

    def format_of(self, name: str) -> int:
        """Return the GGUF type number of layer ``name``, -1 if it is not quantised."""
        return self._formats.get(name, -1)


class _Writer:
    """Write one layer's bytecode.

    Operands are tensor numbers: 0 for the hidden states, then the step's shared inputs, the layer's own tensors in the
    order of ``tensor`` calls, and the outputs of stages. While writing, output n is numbered -2 - n, since the number
    of own tensors is not yet known; ``code`` resolves these.
    """

    def __init__(self, num_shared: int) -> None:
        self.own: list[Tensor] = []
        self._first_own = 1 + num_shared
        self._code: list[int] = []
        self._outputs: list[int] = []  # indices in ``_code`` that may hold the number of a stage's output
        self._num_outputs = 0
        self.numbers: list[float] = []

    def tensor(self, tensor: Tensor | None) -> int:
        """Register a tensor of the layer and return its number; ``_NOTHING`` for None."""
        if tensor is None:
            return _NOTHING
        self.own.append(tensor)
        return self._first_own + len(self.own) - 1

    def code(self) -> list[int]:
        """Return the finished bytecode, with the numbers of stage outputs resolved."""
        first = self._first_own + len(self.own)
        return [
            first - 2 - value if place in self._given and value < _NOTHING else value
            for place, value in enumerate(self._code)
        ]

    @property
    def _given(self) -> set[int]:
        return set(self._outputs)

    def _add(self, values: Sequence[int], plain: Sequence[int] = ()) -> None:
        """Append tensor numbers ``values``, which may be stage outputs (below -1), then plain integers."""
        self._outputs += range(len(self._code), len(self._code) + len(values))
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
        gate: int = _NOTHING,
        is_gelu: bool = False,
        residual: int = _NOTHING,
        scale: float = 1.0,
    ) -> list[int]:
        """Write linear layers over one input, quantised ones and others as separate stages; return output numbers.

        ``norm``: RMS norm applied to the input. ``gate``: tensor whose activation multiplies the input. ``residual``:
        tensor added to the outputs, which are multiplied by ``scale`` before.
        """
        given: dict[int, int] = {}
        for is_quantised in (True, False):
            chosen = [i for i, layer in enumerate(layers) if (layer.format >= 0) == is_quantised]
            if not chosen:
                continue
            self._code.append(_LINEARS)
            self._add([source, gate], [int(is_gelu)])
            self._add([self.tensor(norm)], [norm_kind])
            self._add([residual], [len(chosen)])
            for i in chosen:
                layer = layers[i]
                self._add([self.tensor(layer.packed), self.tensor(layer.bias)], [layer.outputs, layer.format])
                given[i] = self._give()
            self.numbers += [eps, scale, 0.0]
        return [given[i] for i in range(len(layers))]

    def norm(self, source: int, weight: Tensor, kind: int, eps: float, residual: int = _NOTHING) -> int:
        """Write an RMS norm of ``source``, added to ``residual`` if given; return its output's number."""
        self._code.append(_NORM)
        self._add([source, self.tensor(weight)], [kind])
        self._add([residual])
        self.numbers += [eps, 0.0, 0.0]
        return self._give()

    def attention(self, values: Sequence[int], window: int, norm_kind: int, turn: int, numbers: Sequence[float]) -> int:
        """Write tree attention over the operands ``values``; return its output's number."""
        self._code.append(_ATTENTION)
        self._add(values, [window, norm_kind, turn])
        self.numbers += numbers
        return self._give()


class Program(NamedTuple):
    """The bytecode, float parameters and own tensors of one layer."""

    code: list[int]
    numbers: list[float]
    own: list[Tensor]

    def kind(self) -> tuple[object, ...]:
        """Return a key that is equal for layers that can share their bytecode."""
        return tuple(self.code), tuple(self.numbers), tuple(tensor.shape[-1] for tensor in self.own)


def layer_program(
    of: Description, shape: LayerShape, name: str, weights: Weights, caches: tuple[Tensor, Tensor]
) -> Program:
    """Write the bytecode of decoder layer ``name`` over the key and value ``caches`` [Hkv, S, D].

    Raises:
        NotCoveredError: if a tensor is missing or has an unsupported layout.
    """
    writer = _Writer(2 + 2 * len(of.ropes))
    tensors, kind, eps = weights.tensors, of.norm_kind, of.norm_eps
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"

    def norm(part: str) -> Tensor | None:
        return tensors.get(f"{name}.{part}.weight")

    has_four = norm("pre_feedforward_layernorm") is not None
    before = norm("input_layernorm")
    behind_attention = norm("post_attention_layernorm") if has_four or before is None else None
    before_mlp = norm("pre_feedforward_layernorm") if has_four or before is None else norm("post_attention_layernorm")

    def added(source: int, layer: Linear, residual: int, behind: Tensor | None, **reads: object) -> int:
        """Write ``layer``, the norm ``behind`` it if there is one, and the addition to ``residual``."""
        if behind is None:
            (given,) = writer.linears(source, [layer], residual=residual, scale=of.residual_scale, **reads)  # type: ignore[arg-type]
            return given
        (given,) = writer.linears(source, [layer], **reads)  # type: ignore[arg-type]
        return writer.norm(given, behind, kind, eps, residual)

    sizes = [heads * of.head_size for heads in (of.query_heads, of.key_heads, of.key_heads)]
    if weights.has(f"{attention}.qkv_proj.packed"):
        layers = weights.joined(f"{attention}.qkv_proj", sizes)
    else:
        parts = ("q_proj", "k_proj", "v_proj")
        layers = [weights.linear(f"{attention}.{part}", size) for part, size in zip(parts, sizes, strict=True)]
    query, key, value = writer.linears(CARRIED, layers, norm=before, norm_kind=kind, eps=eps)
    query, key, head_norms = _normed_heads(writer, of, tensors, attention, (query, key))
    turn = [_NOTHING] * 2 if shape.rope is None else _turn_of(of, shape.rope)
    own = [writer.tensor(cache) for cache in caches]
    attended = writer.attention(
        [query, key, value, *head_norms, *turn, *own, OFFSETS, MASK],
        shape.window, kind, of.turn, [eps, of.scale, of.softcap],
    )  # fmt: skip
    output = weights.linear(f"{attention}.o_proj", of.hidden_size)
    between = added(attended, output, CARRIED, behind_attention)
    if weights.has(f"{mlp}.gate_up_proj.packed"):
        layers = weights.joined(f"{mlp}.gate_up_proj", [of.inner_size] * 2)
    else:
        layers = [weights.linear(f"{mlp}.{part}", of.inner_size) for part in ("gate_proj", "up_proj")]
    gate, up = writer.linears(between, layers, norm=before_mlp, norm_kind=kind, eps=eps)
    down = weights.linear(f"{mlp}.down_proj", of.hidden_size)
    added(up, down, between, norm("post_feedforward_layernorm"), gate=gate, is_gelu=of.is_gelu)
    return Program(writer.code(), writer.numbers, writer.own)


def _normed_heads(
    writer: _Writer, of: Description, tensors: Mapping[str, Tensor], name: str, rows: tuple[int, int]
) -> tuple[int, int, list[int]]:
    """Return (queries, keys, norms of single heads). A norm over all heads together is written as a separate stage."""
    norms = [tensors.get(f"{name}.{part}.weight") for part in ("q_norm", "k_norm")]
    query, key = rows
    if norms[0] is None or norms[1] is None:
        return query, key, [_NOTHING] * 2
    if norms[0].shape[0] == of.head_size:
        return query, key, [writer.tensor(norm) for norm in norms]
    query, key = (
        writer.norm(source, norm, of.norm_kind, of.norm_eps)
        for source, norm in zip(rows, (norms[0], norms[1]), strict=True)
    )
    return query, key, [_NOTHING] * 2


def _turn_of(of: Description, rope: str) -> list[int]:
    """Return the tensor numbers of a rotary table's cosines and sines."""
    first = FIRST_TURN + 2 * list(of.ropes).index(rope)
    return [first, first + 1]


class LayerStack:
    """All layers of a model and its final norm, over its tensors and one cache, registered in the native library."""

    def __init__(self, programs: Sequence[Program], num_threads: int) -> None:
        kinds: dict[tuple[object, ...], int] = {}
        numbers = [kinds.setdefault(program.kind(), len(kinds)) for program in programs]
        firsts = [programs[numbers.index(kind)] for kind in range(len(kinds))]
        tensors = [tensor for program in programs for tensor in program.own]
        self._number = torch.ops.yggdrasil.keep_stack(
            tensors, numbers, list(range(len(tensors))),
            [number for first in firsts for number in first.code], [len(first.code) for first in firsts],
            [number for first in firsts for number in first.numbers],
            [size for first in firsts for size in (len(first.numbers), len(first.own))],
        )  # fmt: skip
        self._num_threads = num_threads
        finalize(self, drop_stack, self._number)

    def run(self, rows: Tensor, shared: list[Tensor], kept: list[int]) -> list[Tensor]:
        """Run all layers on ``rows`` [W, H]; return the outputs [W, H] of layers ``kept``, which must ascend.

        ``shared`` are the tree mask, the offsets, and the cosines and sines of each rotary table.
        """
        outputs: list[Tensor] = torch.ops.yggdrasil.run_stack(self._number, rows, shared, kept, self._num_threads)
        return outputs


def stack_of(
    of: Description, weights: Weights, keys: list[Tensor], values: list[Tensor], num_threads: int
) -> LayerStack:
    """Build the stack of the model's layers, over the caches ``keys`` and ``values`` (L x [Hkv, S, D]), and final norm.

    Raises:
        NotCoveredError: if a tensor is missing or has an unsupported layout.
    """
    programs = []
    for number, (shape, *caches) in enumerate(zip(of.layers, keys, values, strict=True)):
        programs.append(layer_program(of, shape, f"model.layers.{number}", weights, (caches[0], caches[1])))
    last = weights.tensors.get("model.norm.weight")
    if last is None:
        raise NotCoveredError("there is no last norm")
    writer = _Writer(2 + 2 * len(of.ropes))
    writer.norm(CARRIED, last, of.norm_kind, of.norm_eps)
    return LayerStack([*programs, Program(writer.code(), writer.numbers, writer.own)], num_threads)
