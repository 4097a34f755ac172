"""One pass of a natively supported model: embedding, rotary tables, the stack of layers, and the LM head.

Dims: W rows of a step, T tree slots its mask covers, V vocabulary, H hidden size, R rows whose logits are requested.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from weakref import finalize

import torch
from torch import Tensor

from yggdrasil.native import is_native
from yggdrasil.native.operators import drop_stack
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.native_steps.bytecode import CARRIED, Program, Writer
from yggdrasil.runtime.native_steps.description import Description, LayerShape, describe
from yggdrasil.runtime.native_steps.families import BOTH, DENSE, FULL, SLIDING, names_of
from yggdrasil.runtime.native_steps.mixers import RECURRENT, Mixed, write_attention, write_mlp
from yggdrasil.runtime.native_steps.mixtures import write_mixture
from yggdrasil.runtime.native_steps.packed import Linear, NotCoveredError, Weights
from yggdrasil.runtime.passes import HEAD_INPUT, Forward
from yggdrasil.runtime.states.buffers import parents_of

_TEXT = "model.language_model."  # prefix of the text model's tensors in a multimodal model
_Value = TypeVar("_Value")


def _plainly_named(values: Mapping[str, _Value], names: Mapping[str, str]) -> dict[str, _Value]:
    """Rename the keys of ``values`` from a multimodal model's or the family's (``names``) weight names to Llama's."""
    return {_plain_name(name, names): value for name, value in values.items()}


def _plain_name(name: str, names: Mapping[str, str]) -> str:
    name = name.replace(_TEXT, "model.")
    for ours, theirs in names.items():
        name = name.replace(theirs, ours)
    return name


def native_call(
    loaded: LoadedModel, cache: StaticCache, vocab_size: int, hidden_layers: Sequence[int] = ()
) -> "NativeCall | None":
    """Return a call that runs passes of a model over ``cache`` in the native library, without transformers' code.

    Returns None on a GPU, without the native library, or if native steps do not cover the model's family or tensors.

    Args:
        vocab_size: number of logits of a row that a pass returns.
        hidden_layers: indices of layers whose outputs a pass returns; -1 stands for the LM head's input.
    """
    described = describe(loaded.config) if is_native() and loaded.device.type == "cpu" else None
    if described is None:
        return None
    try:
        return NativeCall(loaded, described, cache, vocab_size, hidden_layers)
    except NotCoveredError:
        return None


class NativeCall:
    """``ModelCall`` that runs the native layer stack, always over the weights and cache given to the constructor."""

    def __init__(
        self,
        loaded: LoadedModel,
        described: Description,
        cache: StaticCache,
        vocab_size: int,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_layers = tuple(hidden_layers)
        names = names_of(loaded.config)
        weights = Weights(_plainly_named(loaded.tensors, names), _plainly_named(loaded.formats, names))
        positions = min(described.max_positions, cache.capacity)
        self._last_position = positions - 1
        self._last_token = loaded.vocab_size - 1
        self._stack = stack_of(described, weights, cache, loaded.num_threads)
        # Rotary embeddings computed in float32 read a float32 table.
        table_dtype = loaded.dtype if described.turn == 0 else torch.float32
        self._rotary = [
            RotaryTable(rope, described.rotary_size, positions, table_dtype) for rope in described.ropes.values()
        ]
        self._is_recurrent = described.recurrence is not None
        self._embedding = _Embedding(loaded, described, weights)
        self._head = _Head(loaded, described, weights, vocab_size)
        self._kept = [*sorted({layer for layer in self.hidden_layers if layer >= 0}), len(described.layers)]

    def __call__(
        self,
        weights: list[Tensor],  # ignored, like ``caches``: the call uses the tensors given to the constructor
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        positions: Tensor,  # [W] int64
        tree_mask: Tensor,  # [W, T] bool over the slots from offsets[0] on
        offsets: Tensor,  # [2] int64: context length, first slot written
        rows: Tensor | None = None,  # [R] int64, rows whose logits are requested; None for all
    ) -> Forward:
        # Clamped: a drafter's embedding may have fewer rows than the target's padded vocabulary, and padding rows may
        # be past the last position.
        embedded = self._embedding(tokens.clamp(max=self._last_token))
        places = positions.clamp(max=self._last_position)
        last = int(places.max())
        shared = [tree_mask, offsets, *(part for table in self._rotary for part in table.rows(places, last))]
        if self._is_recurrent:
            shared.append(parents_of(tree_mask))
        outputs = dict(zip(self._kept, self._stack.run(embedded, shared, self._kept), strict=True))
        hidden = outputs[self._kept[-1]]
        wanted = hidden if rows is None else hidden.index_select(0, rows)
        layers = [hidden if layer == HEAD_INPUT else outputs[layer] for layer in self.hidden_layers]
        return Forward(wanted, layers, self._head)


class _Embedding:
    """The token embedding, including the family's scale; full or quantised."""

    def __init__(self, loaded: LoadedModel, described: Description, weights: Weights) -> None:
        name = "model.embed_tokens"
        self._table = weights.tensors.get(f"{name}.weight")
        self._packed, self._format = weights.tensors.get(f"{name}.packed"), weights.format_of(name)
        if self._table is None and (self._packed is None or self._format < 0):
            raise NotCoveredError("there is no embedding")
        self._shape = described.hidden_size, loaded.vocab_size
        self._dtype = loaded.dtype
        scale = described.embedding_scale
        self._scale: float | Tensor = torch.tensor(scale).to(loaded.dtype) if described.is_scale_rounded else scale
        self._is_scaled = scale != 1.0

    def __call__(self, tokens: Tensor) -> Tensor:
        if self._table is not None:
            rows = self._table.index_select(0, tokens)
        else:
            rows = torch.ops.yggdrasil.quantised_rows(tokens, self._packed, self._format, *self._shape, self._dtype)
        return rows * self._scale if self._is_scaled else rows


class _Head:
    """The LM head; computes all logits, or only the argmax token of each row."""

    def __init__(self, loaded: LoadedModel, described: Description, weights: Weights, vocab_size: int) -> None:
        name = "lm_head" if weights.has("lm_head.packed") else "model.embed_tokens"  # a tied quantised embedding
        self._layer = weights.linear(name, loaded.vocab_size)
        if name != "lm_head" and self._layer.format < 0:
            raise NotCoveredError("there is no output layer")
        copy, factors = (weights.tensors.get(f"lm_head.{part}") for part in ("copy", "factors"))
        self._head_copy = None if copy is None or factors is None else (copy, factors)
        self._threads, self._vocab_size = loaded.num_threads, vocab_size
        self._divisor, self._softcap = described.logit_divisor, described.logit_softcap
        # Divisor and softcap round again and may make two logits equal, of which the first is to be chosen.
        self._is_plain = self._divisor == 1.0 and self._softcap == 0.0 and vocab_size == loaded.vocab_size

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states ``rows`` [R, H]."""
        layer = self._layer
        logits: Tensor = _outputs(rows, layer, self._threads)
        if self._divisor != 1.0:
            logits = logits / self._divisor
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits[:, : self._vocab_size]

    def best(self, rows: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (largest logit [R], its token [R] int64) for hidden states ``rows`` [R, H].

        ``logits`` [R, V] are the rows' logits if they are already computed, else None.
        """
        if logits is None and not self._is_plain:
            logits = self.logits(rows)
        packed, bias, outputs, form = self._layer
        operators = torch.ops.yggdrasil
        if logits is not None:
            best, tokens = operators.best_tokens(logits, self._threads)
        elif form >= 0:
            best, tokens = operators.quantised_best(rows, packed, bias, outputs, form, self._threads)
        elif self._head_copy is not None:
            best, tokens = operators.bounded_argmax(rows, packed, bias, *self._head_copy, outputs, self._threads)
        else:
            best, tokens = operators.packed_best(rows, packed, bias, outputs, self._threads)
        return best, tokens


def _outputs(rows: Tensor, layer: Linear, num_threads: int) -> Tensor:
    """Apply a packed or quantised linear layer to ``rows`` [R, H]."""
    packed, bias, outputs, form = layer
    operators = torch.ops.yggdrasil
    given: Tensor
    if form >= 0:
        given = operators.quantised_linear(rows, packed, bias, outputs, form, num_threads)
    else:
        given = operators.packed_linear(rows, packed, bias, outputs, num_threads)
    return given


def layer_program(
    model: Description, shape: LayerShape, name: str, weights: Weights, remembered: Sequence[Tensor]
) -> Program:
    """Return the bytecode of the decoder layer ``name``, such as "model.layers.0", with its tensors.

    Args:
        shape: the layer's properties.
        weights: packed tensors by name.
        remembered: the layer's tensors of the cache, as ``StaticCache.of_layer`` returns them.

    Raises:
        NotCoveredError: a tensor is missing or has an unsupported layout.
    """
    writer, kind, eps, scales = _writer(model), model.norm_kind, model.norm_eps, model.scales

    def norm(part: str) -> Tensor | None:
        return weights.tensors.get(f"{name}.{part}.weight")

    has_four = norm("pre_feedforward_layernorm") is not None
    alone = norm("norm")  # the only norm of a layer with one part (Nemotron-H)
    before = norm("input_layernorm") if alone is None else alone
    behind_mixer = norm("post_attention_layernorm") if has_four or before is None else None
    before_mlp = norm("pre_feedforward_layernorm") if has_four or before is None else norm("post_attention_layernorm")

    def added(mixed: Mixed, residual: int, scale: float, behind: Tensor | None) -> int:
        """Write a part's last linear layer, the norm after it (``behind``, if any), and the addition to ``residual``.

        Without a norm, ``scale`` multiplies the linear layer's output. Return the tensor number of the sum.
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
        """Run all layers on the hidden states ``rows`` [W, H]; write their KV entries and factors to the stack's cache.

        Args:
            shared: in this order: the tree mask [W, T] bool; the offsets [2] int64 (context length, first slot
                written); the cosines [W, D] and sines [W, D] of each rotary table; with recurrent layers, the parent of
                each row [W] int64.
            kept: indices of layers, ascending; an index equal to the number of layers stands for the final norm.

        Returns:
            The outputs [W, H] of the layers ``kept``, in that order.
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


_FIRST_ROWS = 512


class RotaryTable:
    """Cosines and sines [P, D] in ``dtype`` for P positions; the second half of each row equals the first.

    The first rows are computed when needed, and their number at least doubles each time: a model may have 131,072
    positions, of which most texts use a few hundred.
    """

    def __init__(self, rope: Mapping[str, Any], size: int, positions: int, dtype: torch.dtype) -> None:
        self._frequencies, self._scale = frequencies(rope, size)
        with torch.inference_mode(False):  # rows are written later, in either mode
            self._cosines, self._sines = (torch.empty(positions, size, dtype=dtype) for _ in range(2))
        self._computed = 0

    def rows(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines, [W, D] each, of ``positions`` [W] int64.

        Args:
            last: the largest of ``positions``, or a larger position; rows up to ``last`` are computed if missing.
        """
        if last >= self._computed:
            self._compute(max(last + 1, _FIRST_ROWS, 2 * self._computed))
        return self._cosines.index_select(0, positions), self._sines.index_select(0, positions)

    @torch.no_grad()
    def _compute(self, end: int) -> None:
        """Compute the missing rows before position ``end``."""
        begin, end = self._computed, min(end, len(self._cosines))
        angles = torch.arange(begin, end, dtype=torch.int64).float()[:, None] * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        self._cosines[begin:end] = angles.cos() * self._scale
        self._sines[begin:end] = angles.sin() * self._scale
        self._computed = end


def frequencies(rope: Mapping[str, Any], size: int) -> tuple[Tensor, float]:
    """Return the frequencies of a rotary embedding, [size / 2] float32 in radians per position, and a factor.

    Cosines and sines must be multiplied by the factor.

    Args:
        rope: transformers' ``rope_parameters``.
        size: number of a head's channels that are rotated.
    """
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    shares = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    turns = 1.0 / (theta**shares)
    if kind == "linear":
        return turns / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(turns, rope), 1.0
    if kind == "longrope":  # factors for the original context; longer texts are not supported
        original = float(rope["original_max_position_embeddings"])
        factor = float(rope.get("factor") or float(rope["max_position_embeddings"]) / original)
        scale = rope.get("attention_factor")
        if scale is None:
            scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        short = torch.tensor(rope["short_factor"], dtype=torch.float32)
        return 1.0 / (short * theta**shares), float(scale)
    if kind == "yarn":
        return _yarn(turns, rope)
    return turns, 1.0


def _yarn(turns: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Return frequencies scaled by YaRN (low ones divided, high ones kept, others interpolated) and tables' factor."""
    length, size = float(rope["original_max_position_embeddings"]), 2 * len(turns)
    factor = float(rope.get("factor") or rope["max_position_embeddings"] / length)

    def grown(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention, scales = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if attention is None:
        attention = grown(scales[0]) / grown(scales[1]) if scales[0] and scales[1] else grown()
    theta = float(rope["rope_theta"])
    low, high = (
        size * math.log(length / (float(rope.get(name) or usual) * 2 * math.pi)) / (2 * math.log(theta))
        for name, usual in (("beta_fast", 32), ("beta_slow", 1))
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(len(turns)).float() - low) / (high - low if high != low else 0.001)
    share = 1 - ramp.clamp(0, 1)  # of the kept frequency
    return turns / factor * (1 - share) + turns * share, float(attention)


def _llama3(turns: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Return frequencies scaled by Llama 3's rule: low ones divided by a factor, high ones kept, others between."""
    length = float(rope["original_max_position_embeddings"])
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    wavelengths = 2 * math.pi / turns
    slow = torch.where(wavelengths > length / low, turns / factor, turns)
    smooth = (length / wavelengths - low) / (high - low)
    mixed = (1 - smooth) * slow / factor + smooth * slow
    is_between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
    return torch.where(is_between, mixed, slow)
