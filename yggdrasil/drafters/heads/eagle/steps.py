"""Steps of a head: cache accepted tokens with the target's hidden states, and grow one tree level from its own outputs.

A row reads a token and the feature of the position before it, so the first token of a text has no row, and the row of
token i is cached in slot i - 1. Outputs of tree nodes are stored in a buffer, which the next level reads its features
from.

Dims: W rows, N tree nodes, S concatenated hidden states of the target, H the head's hidden size, M calibration knots.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from yggdrasil.drafters.heads.layers import target_tokens
from yggdrasil.drafters.heads.loading import DraftingHead
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.traced import CallStep
from yggdrasil.tree.growth import attach_best, likeliest, offer, plant_root
from yggdrasil.tree.token_tree import TokenTree


class Place(NamedTuple):
    """Positions, attention mask and cache slots of a pass's rows."""

    positions: Tensor  # [W] int64
    mask: Tensor  # [W, T] bool over the slots from offsets[0] on
    offsets: Tensor  # [2] int64: number of slots before the mask, first slot written


class HeadCall:
    """The traced part of a head's steps: its module as a function of weights and caches."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._names = loaded, list(loaded.tensors)

    def __call__(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        states: Tensor,  # [W, S] hidden states of the target if of_target, else [W, H] features
        place: Place,
        *,
        of_target: bool,
        rows: Tensor | None = None,  # [R] int64: rows to compute logits of; None for all
    ) -> tuple[Tensor, Tensor]:
        """Run the head; return logits [R, draft vocabulary] and the features [R, H] for rows one level below."""
        module: Any = self._loaded.model
        run = _Pass(module, caches, place, self._loaded.num_threads, of_target=of_target, rows=rows)
        found: tuple[Tensor, Tensor] = torch.func.functional_call(
            run, {f"module.{name}": weight for name, weight in zip(self._names, weights, strict=True)}, (tokens, states)
        )
        return found

    def target_tokens(self, weights: list[Tensor], drafted: Tensor) -> Tensor:
        """Map draft vocabulary ids to the target's token ids, same shape."""
        return target_tokens(drafted, dict(zip(self._names, weights, strict=True)).get("head.d2t"))


class _Pass(torch.nn.Module):
    """One pass of the head over its cache, as a module whose tensors ``functional_call`` supplies."""

    def __init__(
        self,
        module: DraftingHead,
        caches: list[Tensor],
        place: Place,
        num_threads: int,
        *,
        of_target: bool,
        rows: Tensor | None,
    ) -> None:
        super().__init__()
        self.module = module
        self._caches, self._place, self._num_threads = tuple(caches), place, num_threads
        self._of_target, self._rows = of_target, rows

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        head: Any = self.module.head
        features = head.feature(states) if self._of_target else states
        outputs = head(self.module.embedding(tokens), features, self._place.positions, self._attend, self._rows)
        return head.logits(outputs), head.fed_back(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        head: Any = self.module.head
        mask = self._place.mask
        if query.shape[-2] < key.shape[-2]:  # only the queries of self._rows
            mask = mask[self._rows]
        output: Tensor = torch.ops.yggdrasil.tree_attention(
            query[None], key[None], value[None], self._caches[0], self._caches[1], self._place.offsets,
            mask, query.shape[-1] ** -0.5, head.settings.window, 0.0, None, self._num_threads,
        )  # fmt: skip
        return output[0]


class HeadStep(CallStep[HeadCall]):
    """Cache newly accepted tokens (padded to W); the last becomes the tree's root, and its candidates join the pool."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        states: Tensor,  # [W, S]
        span: Tensor,  # [2] int64: slot of the first row, number of rows that are no padding
        knots: Tensor,  # [M] float32
        features: Tensor,  # [N, H], written
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree, call = TokenTree(*tree_buffers), self._call
        start, last = span[:1], span[1:] - 1
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        place = Place(start + rows, rows[:, None] >= rows[None, :], start.expand(2).contiguous())
        logits, outputs = call(weights, caches, tokens, states, place, of_target=True, rows=last)
        plant_root(tree, tokens[last])
        features[:1] = outputs
        _offer(call, weights, tree, torch.zeros_like(last), logits, knots)
        return (last,)


class LevelStep(CallStep[HeadCall]):
    """Attach the W best candidates, run the head on them and their parents' outputs, and add their candidates."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: the root's slot, number of the first new node
        rows: Tensor,  # [W] int64; only its size is read
        knots: Tensor,  # [M] float32
        features: Tensor,  # [N, H], read and written
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree, call = TokenTree(*tree_buffers), self._call
        root, first = place[:1], place[1:]
        nodes = attach_best(tree, first, rows.shape[0])
        where = Place(root + tree.depths[nodes], tree.ancestors[nodes], torch.cat([root, root + first]))
        parents = features[tree.parents[nodes]]
        logits, outputs = call(weights, caches, tree.tokens[nodes], parents, where, of_target=False)
        features[nodes] = outputs
        _offer(call, weights, tree, nodes, logits, knots)
        return (nodes,)


def _offer(
    call: HeadCall, weights: list[Tensor], tree: TokenTree, nodes: Tensor, logits: Tensor, knots: Tensor
) -> None:
    edges, drafted = likeliest(logits, tree.candidates)
    offer(tree, nodes, edges, call.target_tokens(weights, drafted), knots)
