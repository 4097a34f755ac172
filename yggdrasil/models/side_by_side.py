"""Texts of unequal length in one pass of a model, each with keys and values of its own.

A pass takes one more token of each of the first M rows and whole prompts for the rows behind them, all in one line
without padding: what does not look across places (nearly all of a model) sees one batch of N tokens.

Dims: R rows, M rows that go on, S slots of a row, N tokens of a pass, Hq and Hkv heads, G = Hq / Hkv, D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from yggdrasil.models.attention import keep_mask, refuse_extras
from yggdrasil.models.loaded import LoadedModel

SIDE_BY_SIDE = "yggdrasil_side_by_side"


class Rows:
    """Keys and values of R texts, allocated once, and what the pass that runs holds of them."""

    def __init__(self, loaded: LoadedModel, num_rows: int, capacity: int) -> None:
        shapes = [(num_rows, heads, capacity, size) for heads, size in loaded.outline.key_heads]
        self._caches = [  # zeros: what is masked is added to a sum too, times nothing
            tuple(torch.zeros(shape, dtype=loaded.dtype, device=loaded.device) for _ in range(2)) for shape in shapes
        ]
        self._model, self._device = loaded.model, loaded.device
        self.num_rows, self.capacity = num_rows, capacity
        self._going = self._positions = torch.empty(0, dtype=torch.int64, device=self._device)  # [M] each
        self._longest = 0  # slots that any of the M rows has filled, with this pass's
        self._prompts: list[int] = []  # lengths of those that this pass reads
        self._masks: dict[int, Tensor] = {}  # by window, [M, 1, 1, longest] to be added to scores
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
        self._begin(lengths, [len(prompt) for prompt in prompts])
        line = [*tokens, *(token for prompt in prompts for token in prompt)]
        places = [*lengths, *(place for prompt in prompts for place in range(len(prompt)))]
        ends = torch.tensor([1] * len(tokens) + self._prompts).cumsum(0).to(self._device) - 1
        model: Any = self._model
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: (given[0][:, ends],))
        try:
            output = model(
                torch.tensor([line], device=self._device), position_ids=torch.tensor([places], device=self._device),
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
        self._positions = torch.tensor(list(lengths), dtype=torch.int64, device=self._device)
        self._going = torch.arange(len(lengths), device=self._device)
        self._longest = max(lengths, default=-1) + 1
        self._prompts, self._masks, self._layers_attended = prompts, {}, 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        """Keep ``key`` and ``value`` [N, Hkv, D] and attend to them with ``query`` [N, Hq, D]; returns [N, Hq, D]."""
        keys, values = self._caches[layer]
        self._layers_attended += 1
        going, heads = len(self._going), key.shape[1]
        keys[self._going, :, self._positions], values[self._going, :, self._positions] = key[:going], value[:going]
        parts = []
        if going:
            parts.append(_attention(
                query[:going].unflatten(1, (heads, -1)), keys[:going, :, : self._longest],
                values[:going, :, : self._longest], self._mask(window, query.dtype), scale, softcap,
            ).flatten(1, 2))  # fmt: skip
        begin = going
        for row, length in enumerate(self._prompts, start=going):
            own = slice(begin, begin + length)
            keys[row, :, :length], values[row, :, :length] = key[own].transpose(0, 1), value[own].transpose(0, 1)
            parts.append(_prompt_attention(query[own], key[own], value[own], scale, window, softcap))
            begin += length
        return torch.cat(parts)

    def _mask(self, window: int, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            slots, last = torch.arange(self._longest, device=self._device), self._positions[:, None]
            seen = slots <= last
            if window:
                seen &= slots > last - window
            zeros = torch.zeros(seen.shape, dtype=dtype, device=self._device)
            self._masks[window] = zeros.masked_fill(~seen, float("-inf"))[:, None, None]
        return self._masks[window]


def _prompt_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """Of one text with itself: [N, Hq, D] to [N, Hq, D]."""
    length, groups = query.shape[0], query.shape[1] // key.shape[1]
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    mask = None
    if softcap or 0 < window < length:
        ahead = torch.ones(length, length, dtype=torch.bool, device=query.device)
        unseen = ahead.triu(1) | (ahead.tril(-window) if window else False)
        mask = torch.zeros(length, length, dtype=query.dtype, device=query.device).masked_fill(unseen, float("-inf"))
    return _attention(query, key, value, mask, scale, softcap)[0].transpose(0, 1)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Causal where there is no mask."""
    if not softcap:
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scale)
    assert mask is not None
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap)) * softcap + mask
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def side_by_side_attention(  # noqa: PLR0913  (the signature is transformers')
    module: nn.Module,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,  # [1, Hkv, N, D]
    value: Tensor,  # [1, Hkv, N, D]
    attention_mask: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    side_by_side: Rows,
    **extra: object,
) -> tuple[Tensor, None]:
    """Each token attends to what its own row holds; returns [1, N, Hq, D]."""
    refuse_extras(module, extra)
    layer = module.layer_idx
    assert isinstance(layer, int)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return side_by_side.attend(layer, query, key, value, scale, sliding_window or 0, softcap or 0.0)[None], None


AttentionInterface.register(SIDE_BY_SIDE, side_by_side_attention)
AttentionMaskInterface.register(SIDE_BY_SIDE, keep_mask)
