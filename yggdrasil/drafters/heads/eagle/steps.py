"""Steps of a head: cache accepted tokens with the target's hidden states; grow a tree level from the head's outputs.

A row reads a token and the feature of the position before it, so the first token of a text has no row, and the row of
token i is cached in slot i - 1. Outputs of tree nodes are stored in a buffer, from which the next level reads features.

Dims: W rows, R rows whose logits are computed, N tree nodes, S concatenated hidden states of the target, H the head's
hidden size, Vd draft vocabulary, M calibration knots.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from yggdrasil.drafters.heads.call import HeadCall
from yggdrasil.runtime.passes import CallStep
from yggdrasil.tree.token_tree import TokenTree, attach_best, likeliest, offer, plant_root


class Place(NamedTuple):
    """Positions, attention mask and cache slots of a pass's rows."""

    positions: Tensor  # [W] int64
    mask: Tensor  # [W, T] bool over the slots from offsets[0] on
    offsets: Tensor  # [2] int64: number of slots before the mask, first slot written


class EagleCall(HeadCall):
    """The traced part of the steps of an EAGLE head or MTP module."""

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
        """Run the head, write the cache, and return logits [R, Vd] and the features [R, H] that child nodes read."""

        def run(module: Any, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
            head = module.head
            features = head.feature(states) if of_target else states

            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                is_partial = query.shape[-2] < key.shape[-2]  # only the queries of ``rows``
                return self.attend(
                    query, key, value, caches=caches, layer=0, offsets=place.offsets,
                    mask=place.mask[rows] if is_partial else place.mask, window=head.settings.window,
                )  # fmt: skip

            outputs = head(module.embedding(tokens), features, place.positions, attend, rows)
            return head.logits(outputs), head.fed_back(outputs)

        found: tuple[Tensor, Tensor] = self.run(run, weights, tokens, states)
        return found


class HeadStep(CallStep[EagleCall]):
    """Cache newly accepted tokens (padded to W), plant the last one as the root, and add its candidates to the pool."""

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


class LevelStep(CallStep[EagleCall]):
    """Attach the W best candidates, run the head on them and their parents' features, and offer their candidates."""

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
    call: EagleCall, weights: list[Tensor], tree: TokenTree, nodes: Tensor, logits: Tensor, knots: Tensor
) -> None:
    edges, drafted = likeliest(logits, tree.candidates)
    offer(tree, nodes, edges, call.target_tokens(weights, drafted), knots)
