"""The compiled steps of Medusa's heads: all levels' candidates from one pass, and levels that cost none.

Which tokens may stand at a depth does not depend on the path there, so the heads' guesses lie in a table, a row for
each depth, and every node's candidates are those of the row below it.

Dims: W rows, N tree nodes, D heads, K candidates a node, H hidden size, M calibration knots.
"""

from typing import Any

import torch
from torch import Tensor

from yggdrasil.drafters.heads.layers import target_tokens
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.traced import CallStep, StepModule
from yggdrasil.tree.growth import attach_best, likeliest, offer, plant_root
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree


class MedusaCall:
    """The traced part of the step: the heads over weights given as inputs."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._names = [name.removeprefix("head.") for name in loaded.tensors]

    def __call__(self, weights: list[Tensor], state: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target's tokens of the ``count`` likeliest at each depth, [D, count] each."""
        module: Any = self._loaded.model
        named = dict(zip(self._names, weights, strict=True))
        logits: Tensor = torch.func.functional_call(module.head, named, (state,))
        edges, drafted = likeliest(logits[0], count)
        return edges, target_tokens(drafted, named.get("d2t"))


class MedusaStep(CallStep[MedusaCall]):
    """Guess every depth from the state before the last certain token; plant that, offer what follows it."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        token: Tensor,  # [1] int64
        state: Tensor,  # [1, H]
        edges: Tensor,  # [D, K] float32, written
        candidates: Tensor,  # [D, K] int64, written
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        found = self._call(weights, state, tree.candidates)
        edges.copy_(found[0])
        candidates.copy_(found[1])
        plant_root(tree, token)
        root = torch.zeros_like(token)
        offer(tree, root, found[0][:1], found[1][:1], knots)
        return (root,)


class MedusaLevelStep(StepModule):
    """Attach the W best candidates, and offer below each what the table has for its depth."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: not read, number of the first new node
        rows: Tensor,  # [W] int64; only its size is read
        edges: Tensor,  # [D, K] float32
        candidates: Tensor,  # [D, K] int64
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        nodes = attach_best(tree, place[1:], rows.shape[0])
        depths = tree.depths[nodes]
        row = depths.clamp(max=edges.shape[0] - 1)
        offer(tree, nodes, edges[row], candidates[row], knots)
        entries = (nodes[:, None] * tree.candidates + torch.arange(tree.candidates, device=nodes.device)).flatten()
        is_guessed = (depths < edges.shape[0]).repeat_interleave(tree.candidates)
        tree.pool_scores[entries] = torch.where(is_guessed, tree.pool_scores[entries], NO_SCORE)
        return (nodes,)
