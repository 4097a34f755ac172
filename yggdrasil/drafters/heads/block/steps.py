"""Steps of a block head: cache keys and values of the accepted text, then draft all tokens of a block in one pass.

A context row depends only on the target's hidden states at its position and is cached in that position's slot. The
block is written after the context; the next context rows overwrite it.

Dims: W context rows, B rows of a block, D drafted tokens, K candidates per node, S concatenated hidden states of the
target, M calibration knots.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.layers import target_tokens
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.traced import CallStep
from yggdrasil.tree.growth import likeliest, offer, plant_root
from yggdrasil.tree.token_tree import TokenTree


class BlockCall:
    """The traced part of the steps: the head over weights and caches given as inputs."""

    def __init__(self, loaded: LoadedModel, num_guesses: int) -> None:
        self._loaded, self._names = loaded, list(loaded.tensors)
        self.num_guesses = num_guesses  # logits are computed for the first so many masks

    def read(self, weights: list[Tensor], caches: list[Tensor], states: Tensor, start: Tensor) -> None:
        """Write the keys and values of ``states`` [W, S] to the slots from ``start`` [1] int64 on."""
        self._run(_read, weights, caches, states, start)

    def guess(self, weights: list[Tensor], caches: list[Tensor], token: Tensor, root: Tensor) -> Tensor:
        """Return logits [D, draft vocabulary] after ``token`` [1] int64, which is at position ``root`` [1] int64."""
        logits: Tensor = self._run(partial(_guess, count=self.num_guesses), weights, caches, token, root)
        return logits

    def target_tokens(self, weights: list[Tensor], drafted: Tensor) -> Tensor:
        """Map draft vocabulary ids to the target's token ids."""
        return target_tokens(drafted, dict(zip(self._names, weights, strict=True)).get("head.d2t"))

    def _run(self, run: Callable[..., Any], weights: list[Tensor], caches: list[Tensor], *inputs: Tensor) -> Any:
        module: Any = self._loaded.model
        named = {f"module.{name}": weight for name, weight in zip(self._names, weights, strict=True)}
        cache = _Cache(caches, module.head.settings.num_layers, self._loaded.num_threads)
        return torch.func.functional_call(_Pass(module, run, cache), named, inputs)


class _Cache:
    """The KV cache of every layer."""

    def __init__(self, caches: list[Tensor], num_layers: int, num_threads: int) -> None:
        self._keys, self._values, self._num_threads = caches, caches[num_layers:], num_threads

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, offsets: Tensor, mask: Tensor, window: int
    ) -> Tensor:
        """Write keys and values, and attend as ``torch.ops.yggdrasil.tree_attention`` does."""
        output: Tensor = torch.ops.yggdrasil.tree_attention(
            query[None], key[None], value[None], self._keys[layer], self._values[layer], offsets, mask,
            query.shape[-1] ** -0.5, window, 0.0, None, self._num_threads,
        )  # fmt: skip
        return output[0]


class _Pass(nn.Module):
    """A module whose forward is ``run``, so that ``functional_call`` can supply its tensors."""

    def __init__(self, module: nn.Module, run: Callable[..., Any], cache: _Cache) -> None:
        super().__init__()
        self.module = module
        self._run, self._cache = run, cache

    def forward(self, *inputs: Tensor) -> Any:
        return self._run(self.module, self._cache, *inputs)


def _read(module: Any, cache: _Cache, states: Tensor, start: Tensor) -> None:
    rows = torch.arange(states.shape[0], device=states.device)
    offsets, first = start.expand(2).contiguous(), rows[None] == 0
    for layer, (key, value) in enumerate(module.head.context(states, start + rows)):
        # The operator that writes the cache also attends: one query that sees a single key costs almost nothing.
        query = key.new_zeros(module.head.settings.layer.query_heads, 1, key.shape[-1])
        cache.attend(query, key, value, layer=layer, offsets=offsets, mask=first, window=1)


def _guess(module: Any, cache: _Cache, token: Tensor, root: Tensor, *, count: int) -> Tensor:
    head, settings = module.head, module.head.settings
    rows = torch.arange(settings.block_size, device=token.device)
    tokens = torch.cat([token, torch.full_like(rows[1:], settings.mask_token)])
    offsets, all_rows = root.expand(2).contiguous(), torch.ones_like(rows[:, None] == rows)
    masks = {True: rows[:, None] >= rows, False: all_rows}
    attends = [
        partial(cache.attend, layer=layer, offsets=offsets, mask=masks[is_causal], window=window)
        for layer, (window, is_causal) in enumerate(settings.views)
    ]
    outputs = head(module.embedding(tokens), root + rows, attends.__getitem__)
    logits: Tensor = head.logits(outputs[1 : 1 + count])
    return logits


class ReadStep(CallStep[BlockCall]):
    """Cache context rows computed from the target's hidden states (padded to W)."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        states: Tensor,  # [W, S]
        start: Tensor,  # [1] int64: slot of the first row
    ) -> tuple[Tensor]:
        self._call.read(weights, caches, states, start)
        return (start.clone(),)


class BlockStep(CallStep[BlockCall]):
    """Draft every depth after the last accepted token, which becomes the tree's root with its candidates."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        token: Tensor,  # [1] int64
        root: Tensor,  # [1] int64: the token's position, after the cached rows
        edges: Tensor,  # [D, K] float32, written
        candidates: Tensor,  # [D, K] int64, written
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree, call = TokenTree(*tree_buffers), self._call
        found, drafted = likeliest(call.guess(weights, caches, token, root), tree.candidates)
        edges.copy_(found)
        candidates.copy_(call.target_tokens(weights, drafted))
        plant_root(tree, token)
        first = torch.zeros_like(token)
        offer(tree, first, edges[:1], candidates[:1], knots)
        return (first,)
