"""The compiled steps of a block head: read what is certain, then guess all tokens of a block in one pass.

A row of the context is made of the target's states at one position and of nothing else, and stands in that position's
slot. A block lies behind the context; the next rows of the context are written over it.

Dims: W rows of the context, B of a block, D guesses, K candidates a node, S the target's states side by side,
M calibration knots.
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
        self.num_guesses = num_guesses  # whose logits are wanted, the first ones

    def read(self, weights: list[Tensor], caches: list[Tensor], states: Tensor, start: Tensor) -> None:
        """Write the rows of ``states`` [W, S] from slot ``start`` [1] on."""
        self._run(_read, weights, caches, states, start)

    def guess(self, weights: list[Tensor], caches: list[Tensor], token: Tensor, root: Tensor) -> Tensor:
        """Logits [D, draft vocabulary] of the places behind ``token`` [1], which is at position ``root`` [1]."""
        logits: Tensor = self._run(partial(_guess, count=self.num_guesses), weights, caches, token, root)
        return logits

    def target_tokens(self, weights: list[Tensor], drafted: Tensor) -> Tensor:
        """The target's tokens of drafted ones."""
        return target_tokens(drafted, dict(zip(self._names, weights, strict=True)).get("head.d2t"))

    def _run(self, run: Callable[..., Any], weights: list[Tensor], caches: list[Tensor], *inputs: Tensor) -> Any:
        module: Any = self._loaded.model
        named = {f"module.{name}": weight for name, weight in zip(self._names, weights, strict=True)}
        cache = _Cache(caches, module.head.settings.num_layers, self._loaded.num_threads)
        return torch.func.functional_call(_Pass(module, run, cache), named, inputs)


class _Cache:
    """Rows of the text in every layer."""

    def __init__(self, caches: list[Tensor], num_layers: int, num_threads: int) -> None:
        self._keys, self._values, self._num_threads = caches, caches[num_layers:], num_threads

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, offsets: Tensor, mask: Tensor, window: int
    ) -> Tensor:
        """Write keys and values, and let ``query`` attend as ``torch.ops.yggdrasil.tree_attention`` does."""
        output: Tensor = torch.ops.yggdrasil.tree_attention(
            query[None], key[None], value[None], self._keys[layer], self._values[layer], offsets, mask,
            query.shape[-1] ** -0.5, window, 0.0, None, self._num_threads,
        )  # fmt: skip
        return output[0]


class _Pass(nn.Module):
    """One pass of ``run`` over the module, for its tensors to be given."""

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
        # The operator that writes rows lets one attend too: here one that sees a single key, for next to nothing.
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
    """Make rows of the context out of the target's states (padded to W)."""

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
    """Guess every depth behind the last certain token; plant that, offer what follows it."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        token: Tensor,  # [1] int64
        root: Tensor,  # [1] int64: its position, behind the rows that are read
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
