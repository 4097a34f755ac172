"""Writes decoder layers as bytecode over the model's tensors, and runs all layers by one native call.

Dims: W rows, H hidden size.
"""

from collections.abc import Sequence
from weakref import finalize

import torch
from torch import Tensor

from yggdrasil.native.operators import drop_stack
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.native_steps.bytecode import CARRIED, Program, Writer
from yggdrasil.runtime.native_steps.description import Description, LayerShape
from yggdrasil.runtime.native_steps.families import BOTH, DENSE, FULL, SLIDING
from yggdrasil.runtime.native_steps.mixers import RECURRENT, Mixed, write_attention, write_mlp
from yggdrasil.runtime.native_steps.mixtures import write_mixture
from yggdrasil.runtime.native_steps.packed import NotCoveredError, Weights


def layer_program(
    model: Description, shape: LayerShape, name: str, weights: Weights, remembered: Sequence[Tensor]
) -> Program:
    """Return the bytecode of the decoder layer ``name``, such as "model.layers.0", with its tensors.

    ``shape`` has the layer's properties, and ``remembered`` its tensors of the cache: keys and values, then recurrent
    states.

    Raises:
        NotCoveredError: a tensor is missing or has an unsupported layout.
    """
    writer, kind, eps, scales = _writer(model), model.norm_kind, model.norm_eps, model.scales

    def norm(part: str) -> Tensor | None:
        return weights.tensors.get(f"{name}.{part}.weight")

    has_four = norm("pre_feedforward_layernorm") is not None
    alone = norm("norm")  # that of a layer with one part (Nemotron-H)
    before = norm("input_layernorm") if alone is None else alone
    behind_mixer = norm("post_attention_layernorm") if has_four or before is None else None
    before_mlp = norm("pre_feedforward_layernorm") if has_four or before is None else norm("post_attention_layernorm")

    def added(mixed: Mixed, residual: int, scale: float, behind: Tensor | None) -> int:
        """Write a part's last linear layer, the norm after it (None: no norm), and the addition to ``residual``.

        ``scale`` multiplies the linear layer's output. Return the tensor number of the sum.
        """
        source, layer, reads = mixed
        if behind is None:
            (given,) = writer.linears(source, [layer], residual=residual, scale=scale, **reads)
            return given
        (given,) = writer.linears(source, [layer], **reads)
        return writer.norm(given, behind, kind, eps, residual)

    def path(part: str) -> str:
        return f"{name}.{part}" if alone is None else f"{name}.mixer"

    between = CARRIED
    if shape.kind in RECURRENT:
        part, write = RECURRENT[shape.kind]
        states = remembered[2:] if shape.kind == BOTH else remembered
        mixed = write(writer, model, weights, path(part), before, states)
        between = added(mixed, between, scales.state, behind_mixer)
    if shape.kind in (FULL, SLIDING, BOTH):
        mixed = write_attention(writer, model, shape, weights, path("self_attn"), before, remembered[:2])
        between = added(mixed, between, scales.attention, behind_mixer)
    mlp, before_own = path("mlp"), before_mlp if alone is None else alone
    if weights.has(f"{mlp}.experts.down_proj") and model.mixture is not None and before_own is not None:
        rows = writer.norm(between, before_own, kind, eps)
        write_mixture(writer, model.mixture, weights, mlp, rows, between, model.hidden_size, scales.mlp)
    elif alone is None:
        mixed = write_mlp(writer, model, weights, mlp, between, before_mlp)
        added(mixed, between, scales.mlp, norm("post_feedforward_layernorm"))
    elif shape.kind == DENSE:
        added(write_mlp(writer, model, weights, mlp, between, before), between, scales.mlp, None)
    return Program(writer.code(), writer.numbers, writer.own)


def _writer(model: Description) -> Writer:
    return Writer(2 + 2 * len(model.ropes) + (model.recurrence is not None))


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
        """Run all layers on the hidden states ``rows`` [W, H], and return the outputs [W, H] of the layers ``kept``.

        ``kept`` are layer numbers in ascending order; the number of layers stands for the final norm. ``shared`` are
        the tree mask, the offsets, the cosines and sines of each rotary table, and the rows' parents if there are
        recurrent layers.
        """
        outputs: list[Tensor] = torch.ops.yggdrasil.run_stack(self._number, rows, shared, kept, self._num_threads)
        return outputs


def stack_of(model: Description, weights: Weights, cache: StaticCache, num_threads: int) -> LayerStack:
    """Return an object that runs all layers and the final norm of a model over ``cache`` by one native call.

    ``weights`` are the model's packed tensors by name.

    Raises:
        NotCoveredError: a tensor is missing or has an unsupported layout.
    """
    programs = [
        layer_program(model, shape, f"model.layers.{number}", weights, cache.of_layer(number))
        for number, shape in enumerate(model.layers)
    ]
    last = weights.tensors.get("model.norm.weight")
    if last is None:
        raise NotCoveredError("there is no last norm")
    writer = _writer(model)
    writer.norm(CARRIED, last, model.norm_kind, model.norm_eps)
    return LayerStack([*programs, Program(writer.code(), writer.numbers, writer.own)], num_threads)
