"""One pass of a natively supported model: embedding, rotary tables, the stack of layers, and the LM head.

Dims: W rows of a step, T tree slots its mask covers, V vocabulary, H hidden size, R rows whose logits are requested.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from yggdrasil.native import is_native
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.forward import HEAD_INPUT, Forward
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.native_steps.description import Description, describe
from yggdrasil.runtime.native_steps.families import names_of
from yggdrasil.runtime.native_steps.layers import stack_of
from yggdrasil.runtime.native_steps.packed import Linear, NotCoveredError, Weights
from yggdrasil.runtime.native_steps.rotary import RotaryTable
from yggdrasil.runtime.states.buffers import parents_of

_TEXT = "model.language_model."  # prefix of the text model's tensors in a multimodal model
_Value = TypeVar("_Value")


def _plainly_named(values: Mapping[str, _Value], names: Mapping[str, str]) -> dict[str, _Value]:
    """Rename the keys of ``values`` from those of a multimodal model or of the family (``names``) to Llama's."""
    return {_plain_name(name, names): value for name, value in values.items()}


def _plain_name(name: str, names: Mapping[str, str]) -> str:
    name = name.replace(_TEXT, "model.")
    for ours, theirs in names.items():
        name = name.replace(theirs, ours)
    return name


def native_call(
    loaded: LoadedModel, cache: StaticCache, vocab_size: int, hidden_layers: Sequence[int] = ()
) -> "NativeCall | None":
    """Return a native pass of a model over ``cache``, which runs without transformers' code and without a compiler.

    Passes return logits of ``vocab_size`` tokens and the outputs of ``hidden_layers``. None on a GPU, without the
    native library, or if the model's family or tensors are not covered.
    """
    described = describe(loaded.config) if is_native() and loaded.device.type == "cpu" else None
    if described is None:
        return None
    try:
        return NativeCall(loaded, described, cache, vocab_size, hidden_layers)
    except NotCoveredError:
        return None


class NativeCall:
    """``ModelCall`` that runs the native layer stack, always over the weights and cache it was built with."""

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
        weights: list[Tensor],  # ignored, as ``caches``: those of the constructor are used
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

        ``logits`` [R, V] are those of the rows if they are already computed, else None.
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
