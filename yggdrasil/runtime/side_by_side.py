"""Batched generation of texts of unequal length without padding, each with its own KV cache.

A pass runs one more token of each of the first M texts and the whole prompts of the texts after them, concatenated to N
tokens; only attention treats the texts separately. Models with recurrent layers, attention sinks or chunked attention
process one text after the other.

Dims: R texts, M texts that continue, S slots of a text, N tokens of a pass, Hq and Hkv heads, D head size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from yggdrasil.runtime.attention import attention_chunk, keep_mask, refuse_extras, tree_attention
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.runner import ModelRunner

SIDE_BY_SIDE = "yggdrasil_side_by_side"
_READ = 64  # tokens per pass of ``OneRow``


class _Part(NamedTuple):
    """Tokens of a pass that share one attention call: all tokens of one row, or one token of each of several rows."""

    tokens: slice
    rows: slice
    seen: Tensor  # int64, number of keys that each token sees, its own included


class Rows:
    """KV caches [R, Hkv, S, D] of a batch of R texts ("rows"), and the layout of the current pass."""

    def __init__(self, loaded: LoadedModel, num_rows: int, capacity: int) -> None:
        shapes = [(num_rows, heads, capacity, size) for heads, size in loaded.sizes.key_heads]
        self._caches = [  # zeros: masked values enter sums with weight 0 and must be finite
            tuple(torch.zeros(shape, dtype=loaded.dtype, device=loaded.device) for _ in range(2)) for shape in shapes
        ]
        self._model, self._device, self._num_threads = loaded.model, loaded.device, loaded.num_threads
        self.num_rows, self.capacity = num_rows, capacity
        self._rows = self._places = torch.empty(0, dtype=torch.int64)  # [N] each: row and slot of each token
        self._parts: list[_Part] = []
        self._layers_attended = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the KV entries of the first ``length`` tokens of the text with index ``source`` to text ``target``."""
        for caches in self._caches:
            for cache in caches:
                cache[target, :, :length] = cache[source, :, :length]

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], lengths: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run one pass over a batch: append a token to each running text, and prefill prompts as further texts.

        More than ``num_rows`` texts, or a text of more than ``capacity`` tokens, raise AssertionError.

        Args:
            tokens: ``tokens[i]`` is appended to text i.
            lengths: ``lengths[i]`` is the number of tokens of text i before the pass.
            prompts: token ids; ``prompts[j]`` replaces text len(tokens) + j.

        Returns:
            Logits [len(tokens) + len(prompts), V] after each text's last token, in the order of the texts.
        """
        return self._pass(tokens, lengths, prompts)

    @torch.inference_mode()
    def can_read(self) -> bool:
        """Return whether all layers of the model support batching: none has attention sinks or chunked attention.

        A pass over one token finds this out, and overwrites the first text's KV cache.
        """
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
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device),  # unused
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
        if lengths:  # one token of each running text
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
        """Store a pass's keys and values in one layer's cache, and return the attention of each token to its own text.

        Args:
            layer: the layer's index.
            query: [N, Hq, D] of all tokens of the pass.
            key, value: [N, Hkv, D].
            scale: factor of the scores.
            window: number of last keys that a token sees; 0 means all.
            softcap: bound of the scores by tanh as in Gemma 2; 0 means no bound.

        Returns:
            Outputs [N, Hq, D].
        """
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
    """KV cache of a single text with the methods of ``Rows``, for models that do not support batching."""

    num_rows = 1

    def __init__(self, loaded: LoadedModel, capacity: int) -> None:
        self.capacity = capacity
        self._runner = ModelRunner(loaded, capacity + _READ, loaded.vocab_size, "eager", widest=_READ)

    def copy(self, source: int, target: int, length: int) -> None:
        """Raise AssertionError: a single text is never copied."""
        raise AssertionError("there is one row")

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], lengths: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run one text, and return the logits [1, V] after its last token.

        The parameters are those of ``Rows.read`` for a batch of one: either ``prompts[0]`` replaces the text, or
        ``tokens[0]`` is appended to the text, of which ``lengths[0]`` must be the length.
        """
        assert len(tokens) + len(prompts) == 1
        if prompts:
            self._runner.text.forget()
        assert not tokens or list(lengths) == [self._runner.text.num_rows]
        given = torch.tensor(list(tokens or prompts[0]), device=self._runner.loaded.device)
        *_, last = self._runner.extend(given, _READ)
        return last.logits[-1:]


def allocate_rows(loaded: LoadedModel, num_rows: int, capacity: int) -> "Rows | OneRow":
    """Allocate KV caches for a batch of ``num_rows`` texts of at most ``capacity`` tokens each.

    If the model does not support batching, a cache of one text is returned (``OneRow``, whose ``num_rows`` is 1).
    Before this call and while passes run, the model's attention implementation must be ``SIDE_BY_SIDE``.
    """
    if loaded.sizes.recurrence is not None:
        return OneRow(loaded, capacity)
    rows = Rows(loaded, num_rows, capacity)
    return rows if rows.can_read() else OneRow(loaded, capacity)


class _OneByOneError(Exception):
    """A layer has attention sinks or chunked attention, which batching does not support."""


def side_by_side_attention(  # noqa: PLR0913  (the signature is transformers')
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    side_by_side: Rows | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attention function like ``tree_attention`` in which each token of a batch attends to its own text.

    Args:
        query: [1, Hq, N, D].
        key, value: [1, Hkv, N, D].
        side_by_side: the texts' KV caches; None means that a step calls the model, so that tree attention runs.

    Returns:
        (Outputs [1, N, Hq, D of ``value``], None)

    Raises:
        YggdrasilError: ``extra`` has an argument that this attention does not support.
    """
    if side_by_side is None:
        given = query, key, value, attention_mask, scaling, sliding_window, softcap, s_aux
        return tree_attention(module, *given, **extra)
    refuse_extras(module, extra)
    if s_aux is not None or attention_chunk(module):
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
