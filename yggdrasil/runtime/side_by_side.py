"""Texts of unequal length in one pass of a model, each with keys and values of its own.

A pass takes one more token of each of the first M rows and whole prompts for the rows behind them, all in one line
without padding: what does not look across places (nearly all of a model) sees one batch of N tokens. Of models with
recurrent layers, attention sinks or chunks, one text after the other is read.

Dims: R rows, M rows that go on, S slots of a row, N tokens of a pass, Hq and Hkv heads, D head size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from yggdrasil.runtime.attention import chunk_of, keep_mask, refuse_extras, tree_attention
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.runner import ModelRunner

SIDE_BY_SIDE = "yggdrasil_side_by_side"
_READ = 64  # tokens of one text that a pass reads


class _Part(NamedTuple):
    """Tokens of a pass that attend alike: those of one row, or one of each of several."""

    tokens: slice
    rows: slice
    seen: Tensor  # keys that each token sees, its own included


class Rows:
    """Keys and values of R texts, allocated once, and what the pass that runs holds of them."""

    def __init__(self, loaded: LoadedModel, num_rows: int, capacity: int) -> None:
        shapes = [(num_rows, heads, capacity, size) for heads, size in loaded.outline.key_heads]
        self._caches = [  # zeros: what is masked is added to a sum too, times nothing
            tuple(torch.zeros(shape, dtype=loaded.dtype, device=loaded.device) for _ in range(2)) for shape in shapes
        ]
        self._model, self._device, self._num_threads = loaded.model, loaded.device, loaded.num_threads
        self.num_rows, self.capacity = num_rows, capacity
        self._rows = self._places = torch.empty(0, dtype=torch.int64)  # [N] each: where a pass keeps its tokens
        self._parts: list[_Part] = []
        self._layers_attended = 0

    def move(self, source: int, target: int, length: int) -> None:
        """Let row ``target`` hold the ``length`` tokens that row ``source`` holds."""
        for caches in self._caches:
            for cache in caches:
                cache[target, :, :length] = cache[source, :, :length]

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], lengths: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read ``tokens[i]`` behind the ``lengths[i]`` that row i holds, and ``prompts`` into the rows after these.

        Returns the logits [M + len(prompts), V] after each row's last token.
        """
        return self._pass(tokens, lengths, prompts)

    @torch.inference_mode()
    def can_read(self) -> bool:
        """Whether all of the model's layers read texts side by side: none has attention sinks or attends in chunks."""
        try:
            self._pass([], [], [[0]])
        except _OneByOneError:
            return False
        return True

    def _pass(self, tokens: Sequence[int], lengths: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        self._begin(lengths, [len(prompt) for prompt in prompts])
        line = [*tokens, *(token for prompt in prompts for token in prompt)]
        ends = torch.tensor([1] * len(tokens) + [len(prompt) for prompt in prompts]).cumsum(0).to(self._device) - 1
        model: Any = self._model
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: (given[0][:, ends],))
        try:
            output = model(
                torch.tensor([line], device=self._device), position_ids=self._places[None],
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device),  # ours are with the rows
                use_cache=False, side_by_side=self,
            )  # fmt: skip
        finally:
            hook.remove()
        assert self._layers_attended == len(self._caches), "a layer attends without the rows' cache"
        logits: Tensor = output.logits[0]
        return logits

    def _begin(self, lengths: Sequence[int], prompts: list[int]) -> None:
        assert len(lengths) + len(prompts) <= self.num_rows
        assert max([*lengths, *(length - 1 for length in prompts)]) < self.capacity
        rows, places = list(range(len(lengths))), list(lengths)
        self._parts, self._layers_attended = [], 0
        if lengths:  # a text each
            self._parts.append(_Part(slice(0, len(rows)), slice(0, len(rows)), self._indices(lengths) + 1))
        for row, length in enumerate(prompts, start=len(lengths)):
            tokens = slice(len(rows), len(rows) + length)
            self._parts.append(_Part(tokens, slice(row, row + 1), self._indices(range(1, length + 1))))
            rows += [row] * length
            places += range(length)
        self._rows, self._places = self._indices(rows), self._indices(places)

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        """Keep ``key`` and ``value`` [N, Hkv, D] and attend to them with ``query`` [N, Hq, D]; returns [N, Hq, D]."""
        keys, values = self._caches[layer]
        self._layers_attended += 1
        keys[self._rows, :, self._places], values[self._rows, :, self._places] = key, value
        return torch.cat([
            torch.ops.yggdrasil.rows_attention(
                query[part.tokens], keys[part.rows], values[part.rows], part.seen, scale, window, softcap,
                self._num_threads,
            )
            for part in self._parts
        ])  # fmt: skip


class OneRow:
    """One text with a cache of its own, for models that ``Rows`` does not read: as ``Rows`` of one row."""

    num_rows = 1

    def __init__(self, loaded: LoadedModel, capacity: int) -> None:
        self.capacity = capacity
        self._runner = ModelRunner(loaded, capacity + _READ, loaded.vocab_size, "eager", widest=_READ)

    def move(self, source: int, target: int, length: int) -> None:
        raise AssertionError("there is one row")

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], lengths: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read the only prompt or the only token; returns the logits [1, V] after it."""
        assert len(tokens) + len(prompts) == 1
        if prompts:
            self._runner.text.forget()
        assert not tokens or list(lengths) == [self._runner.text.num_rows]
        given = torch.tensor(list(tokens or prompts[0]), device=self._runner.loaded.device)
        *_, last = self._runner.extend(given, _READ)
        return last.logits[-1:]


def rows_for(loaded: LoadedModel, num_rows: int, capacity: int) -> "Rows | OneRow":
    """Room for ``num_rows`` texts of ``capacity`` tokens, or for one where the model reads one after the other.

    The model's attention is that of ``SIDE_BY_SIDE`` here and as long as texts are read.
    """
    if loaded.outline.recurrence is not None:
        return OneRow(loaded, capacity)
    rows = Rows(loaded, num_rows, capacity)
    return rows if rows.can_read() else OneRow(loaded, capacity)


class _OneByOneError(Exception):
    """A layer attends in a way that texts side by side do not know: with sinks, or in chunks."""


def side_by_side_attention(  # noqa: PLR0913  (the signature is transformers')
    module: nn.Module,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,  # [1, Hkv, N, D]
    value: Tensor,  # [1, Hkv, N, D]
    attention_mask: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    side_by_side: Rows | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Each token attends to what its own row holds; returns [1, N, Hq, value's D]. A step has a cache of its own."""
    if side_by_side is None:
        given = query, key, value, attention_mask, scaling, sliding_window, softcap, s_aux
        return tree_attention(module, *given, **extra)
    refuse_extras(module, extra)
    if s_aux is not None or chunk_of(module):
        raise _OneByOneError
    value_size = value.shape[-1]
    if value_size < key.shape[-1]:  # latent attention: the cache has one size
        value = functional.pad(value, (0, key.shape[-1] - value_size))
    layer = module.layer_idx
    assert isinstance(layer, int)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = side_by_side.attend(layer, query, key, value, scale, sliding_window or 0, softcap or 0.0)
    return output[None, ..., :value_size], None


AttentionInterface.register(SIDE_BY_SIDE, side_by_side_attention)
AttentionMaskInterface.register(SIDE_BY_SIDE, keep_mask)
