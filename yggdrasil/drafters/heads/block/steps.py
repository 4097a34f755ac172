"""Steps of a block head: cache keys and values of the accepted text, then draft all tokens of a block in one pass.

A context row depends only on the target's hidden states at its position and is cached in that position's slot. The
block is written after the context; the next context rows overwrite it.

Dims: W context rows or nodes, B rows of a block, D drafted tokens, K candidates per node, C candidates per depth, S
concatenated hidden states of the target, H hidden size, R rank of the successor head, N tree nodes, M calibration
knots.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.layers import target_tokens
from yggdrasil.drafters.heads.medusa.steps import offer_to_depth
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.traced import CallStep
from yggdrasil.tree.growth import attach_best, likeliest, offer, plant_root
from yggdrasil.tree.token_tree import TokenTree


class BlockCall:
    """The traced part of the steps: the head over weights and caches given as inputs."""

    def __init__(self, loaded: LoadedModel, num_guesses: int) -> None:
        self._loaded, self._names = loaded, list(loaded.tensors)
        self.num_guesses = num_guesses  # logits are computed for so many rows

    def read(self, weights: list[Tensor], caches: list[Tensor], states: Tensor, start: Tensor) -> None:
        """Compute keys and values of accepted text in every layer and write them to the caches.

        Args:
            weights: the head's tensors.
            caches: KV caches: keys of all layers, then values.
            states: [W, S] concatenated hidden states of the target.
            start: [1] int64 slot of the first row.
        """
        self._run(_read, weights, caches, states, start)

    def guess(self, weights: list[Tensor], caches: list[Tensor], token: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """Draft a block of D tokens: return logits [D, draft vocabulary] and outputs [D, H].

        Args:
            weights: the head's tensors.
            caches: KV caches: keys of all layers, then values.
            token: [1] int64 last accepted token.
            root: [1] int64 its position.
        """
        found: tuple[Tensor, Tensor] = self._run(partial(_guess, count=self.num_guesses), weights, caches, token, root)
        return found

    def follow(
        self, weights: list[Tensor], table: "SuccessorTable", depths: Tensor, before: Tensor, states: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the likeliest tokens after W tree nodes, ranked by the successor head.

        Args:
            weights: the head's tensors.
            table: candidates of every depth, from the block pass.
            depths: [W] int64 depths of the nodes.
            before: [W] int64 token ids of the nodes.
            states: [W, R] path states of the nodes' parents.
            count: number of tokens per node.

        Returns:
            Log-probabilities and target token ids, [W, count] each, and the nodes' path states [W, R].
        """
        rows = depths.clamp(max=self.num_guesses - 1)
        inputs = *(column[rows] for column in table), before, states
        logits, states = self._run(_follow, weights, [], *inputs)
        edges, places = likeliest(logits, count)
        return edges, self.target_tokens(weights, table.candidates[rows].gather(1, places)), states

    def target_tokens(self, weights: list[Tensor], drafted: Tensor) -> Tensor:
        """Map draft vocabulary ids to the target's token ids, same shape."""
        return target_tokens(drafted, dict(zip(self._names, weights, strict=True)).get("head.d2t"))

    def _run(self, run: Callable[..., Any], weights: list[Tensor], caches: list[Tensor], *inputs: Tensor) -> Any:
        module: Any = self._loaded.model
        named = {f"module.{name}": weight for name, weight in zip(self._names, weights, strict=True)}
        cache = _Cache(caches, module.head.settings.num_layers, self._loaded.num_threads)
        return torch.func.functional_call(_Pass(module, run, cache), named, inputs)


class SuccessorTable(NamedTuple):
    """What a block pass finds for each depth, from which the successor head ranks the candidates of a node."""

    logits: Tensor  # [D, C] float32
    candidates: Tensor  # [D, C] int64, draft vocabulary ids
    outputs: Tensor  # [D, H]


class _Cache:
    """The KV cache of every layer."""

    def __init__(self, caches: list[Tensor], num_layers: int, num_threads: int) -> None:
        self._keys, self._values, self._num_threads = caches, caches[num_layers:], num_threads

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, offsets: Tensor, mask: Tensor, window: int
    ) -> Tensor:
        """Write keys and values of new rows to the cache of ``layer``, and return the attention output of ``query``.

        Args:
            offsets: [2] int64: number of slots before the mask, first slot written.
            mask: [W, T] bool over the slots from ``offsets[0]`` on.
            window: attention window in keys; 0: unlimited.
        """
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


def _follow(
    module: Any, _: _Cache, logits: Tensor, drafted: Tensor, outputs: Tensor, before: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = module.head.successors(logits, drafted, before, outputs, states)
    return found


def _guess(module: Any, cache: _Cache, token: Tensor, root: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
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
    outputs = outputs[settings.first_row : settings.first_row + count]
    return head.logits(outputs), outputs


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
        found, drafted = likeliest(call.guess(weights, caches, token, root)[0], tree.candidates)
        edges.copy_(found)
        candidates.copy_(call.target_tokens(weights, drafted))
        plant_root(tree, token)
        first = torch.zeros_like(token)
        offer(tree, first, edges[:1], candidates[:1], knots)
        return (first,)


class SuccessorStep(CallStep[BlockCall]):
    """Find the likeliest tokens of every depth; the last accepted token becomes the tree's root with its candidates."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        token: Tensor,  # [1] int64
        root: Tensor,  # [1] int64: the token's position, after the cached rows
        logits: Tensor,  # [D, C] float32, written
        candidates: Tensor,  # [D, C] int64, written
        outputs: Tensor,  # [D, H], written
        states: Tensor,  # [N, R], written
        *buffers: Tensor,  # knots [M] float32, and those of the tree
    ) -> tuple[Tensor]:
        (knots, *tree_buffers), call, table = buffers, self._call, SuccessorTable(logits, candidates, outputs)
        tree = TokenTree(*tree_buffers)
        found, hidden = call.guess(weights, caches, token, root)
        edges, drafted = likeliest(found, logits.shape[1])
        for buffer, values in zip(table, (edges, drafted, hidden), strict=True):
            buffer.copy_(values)
        plant_root(tree, token)
        first = torch.zeros_like(token)
        edges, tokens, after = call.follow(weights, table, first, token, torch.zeros_like(states[:1]), tree.candidates)
        states[:1] = after
        offer(tree, first, edges, tokens, knots)
        return (first,)


class SuccessorLevelStep(CallStep[BlockCall]):
    """Attach the W best candidates, and rank the candidates of the next depth after each of them."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: unused, index of the first new node
        rows: Tensor,  # [W] int64; only its size is read
        logits: Tensor,  # [D, C] float32
        candidates: Tensor,  # [D, C] int64
        outputs: Tensor,  # [D, H]
        states: Tensor,  # [N, R], read and written
        *buffers: Tensor,  # knots [M] float32, and those of the tree
    ) -> tuple[Tensor]:
        knots, *tree_buffers = buffers
        tree, table = TokenTree(*tree_buffers), SuccessorTable(logits, candidates, outputs)
        nodes = attach_best(tree, place[1:], rows.shape[0])
        edges, tokens, after = self._call.follow(
            weights, table, tree.depths[nodes], tree.tokens[nodes], states[tree.parents[nodes]], tree.candidates
        )
        states[nodes] = after
        offer_to_depth(tree, nodes, edges, tokens, knots, len(logits))
        return (nodes,)
