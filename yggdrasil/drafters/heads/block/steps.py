"""Steps of a block head: cache keys and values of the accepted text, then draft all tokens of a block in one pass.

A context row depends only on the target's hidden states at its position and is cached in that position's slot. The
block is written after the context; the next context rows overwrite it.

Dims: W context rows or nodes, B rows of a block, D drafted tokens, K candidates per node, C candidates per depth, S
concatenated hidden states of the target, H hidden size, R rank of the successor head, N tree nodes, M calibration
knots.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yggdrasil.drafters.heads.call import HeadCall
from yggdrasil.drafters.heads.medusa.steps import offer_to_depth
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.passes import CallStep
from yggdrasil.tree.token_tree import TokenTree, attach_best, likeliest, offer, plant_root


class BlockCall(HeadCall):
    """The traced part of the steps: the head over weights and caches given as inputs."""

    def __init__(self, loaded: LoadedModel, num_guesses: int) -> None:
        super().__init__(loaded)
        self.num_guesses = num_guesses  # D, the number of rows of which logits are computed

    def read(self, weights: list[Tensor], caches: list[Tensor], states: Tensor, start: Tensor) -> None:
        """Compute keys and values of accepted tokens in every layer and write them to the caches.

        Args:
            weights: the head's tensors.
            caches: KV caches: keys of all layers, then values.
            states: [W, S] concatenated hidden states of the target at these tokens.
            start: [1] int64 slot of the first row, which is also its position.
        """

        def run(module: Any, states: Tensor, start: Tensor) -> None:
            rows = torch.arange(states.shape[0], device=states.device)
            offsets, first = start.expand(2).contiguous(), rows[None] == 0
            for layer, (key, value) in enumerate(module.head.context(states, start + rows)):
                # The operator that writes the cache also attends: one query that sees a single key costs almost
                # nothing.
                query = key.new_zeros(module.head.settings.query_heads, 1, key.shape[-1])
                self.attend(query, key, value, caches=caches, layer=layer, offsets=offsets, mask=first, window=1)

        self.run(run, weights, states, start)

    def guess(self, weights: list[Tensor], caches: list[Tensor], token: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """Draft D tokens after the last accepted token, and return logits [D, Vd] and the head's outputs [D, H].

        Row d belongs to the token d + 1 positions after the last accepted token. Vd is the draft vocabulary.

        Args:
            weights: the head's tensors.
            caches: KV caches: keys of all layers, then values.
            token: [1] int64 id of the last accepted token.
            root: [1] int64 position of that token.
        """

        def run(module: Any, token: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
            head, settings = module.head, module.head.settings
            rows = torch.arange(settings.block_size, device=token.device)
            tokens = torch.cat([token, torch.full_like(rows[1:], settings.mask_token)])
            offsets, all_rows = root.expand(2).contiguous(), torch.ones_like(rows[:, None] == rows)
            masks = {True: rows[:, None] >= rows, False: all_rows}
            attends = [
                partial(self.attend, caches=caches, layer=layer, offsets=offsets, mask=masks[is_causal], window=window)
                for layer, (window, is_causal) in enumerate(settings.views)
            ]
            outputs = head(module.embedding(tokens), root + rows, attends.__getitem__)
            outputs = outputs[settings.first_row : settings.first_row + self.num_guesses]
            return head.logits(outputs), outputs

        found: tuple[Tensor, Tensor] = self.run(run, weights, token, root)
        return found

    def follow(
        self, weights: list[Tensor], table: "SuccessorTable", depths: Tensor, before: Tensor, states: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ``count`` likeliest tokens after each of W tree nodes, ranked by the successor head.

        Args:
            weights: the head's tensors.
            table: candidates of every depth, from the block pass.
            depths: [W] int64 depths of the nodes; 0 is the root.
            before: [W] int64 token ids of the nodes.
            states: [W, R] path states of the nodes' parents; zeros for the root.

        Returns:
            Log-probabilities and target token ids, [W, count] each, the likeliest first, and the path states after the
                nodes, [W, R].
        """
        rows = depths.clamp(max=self.num_guesses - 1)
        logits, drafted, outputs = (column[rows] for column in table)
        logits, states = self.run(
            lambda module, *inputs: module.head.successors(*inputs), weights, logits, drafted, before, outputs, states
        )
        edges, places = likeliest(logits, count)
        return edges, self.target_tokens(weights, drafted.gather(1, places)), states


class SuccessorTable(NamedTuple):
    """Results of a block pass for each depth, from which the successor head ranks the candidates of a node."""

    logits: Tensor  # [D, C] float32, log-probabilities of the candidates in the block pass
    candidates: Tensor  # [D, C] int64, draft vocabulary ids
    outputs: Tensor  # [D, H]


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
    """Attach the W best candidates, rank the candidates of the next depth after each, and add these to the pool."""

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
