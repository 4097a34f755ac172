"""Several drafters growing one tree: what one of them does not guess, another may."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.protocol import Drafter, num_kept
from yggdrasil.tree.token_tree import TokenTree


class JointDrafter:
    """Drafter made of others. The first plants and grows the tree; what the others guess is merged into it.

    Each later drafter grows a tree of its own, so none has to know of the others, and its guesses join the shared tree
    below the nodes that are there, in the drafters' order, while there is room: a level may then hold up to ``width``
    nodes of every drafter. Give the tree more nodes than the first drafter fills. Estimates are taken as they come:
    calibrate each drafter's.

    ``side_trees`` holds the later drafters' trees, one each; needed only for drafters bound to a tree when made, as
    ``DraftModel`` is. Otherwise they are allocated when the shared tree is first seen.
    """

    def __init__(self, drafters: Sequence[Drafter], side_trees: Sequence[TokenTree] | None = None) -> None:
        if not drafters:
            raise ValueError("a joint drafter needs at least one drafter")
        if side_trees is not None and len(side_trees) != len(drafters) - 1:
            raise ValueError(f"{len(drafters) - 1} later drafters need as many side trees, got {len(side_trees)}")
        self.drafters = list(drafters)
        self.name = " + ".join(drafter.name for drafter in drafters)
        self.hidden_layers = tuple(sorted({layer for drafter in drafters for layer in drafter.hidden_layers}))
        self._side_trees = None if side_trees is None else list(side_trees)

    def begin(self, tokens: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.begin(tokens)

    def num_kept(self, tokens: Sequence[int]) -> int:
        return min(num_kept(drafter, tokens) for drafter in self.drafters)

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        for drafter in self.drafters:
            drafter.extend(tokens, {layer: hidden[layer] for layer in drafter.hidden_layers})

    def head(self, tree: TokenTree) -> None:
        if self._side_trees is None:
            self._side_trees = [_empty_like(tree) for _ in self.drafters[1:]]
        for drafter, its_tree in zip(self.drafters, [tree, *self._side_trees], strict=True):
            drafter.head(its_tree)

    def grow(self, tree: TokenTree, width: int, depth: int) -> None:
        """Grow every drafter's tree and merge them. ``head`` comes first."""
        assert self._side_trees is not None, "grow was called before head"
        self.drafters[0].grow(tree, width, depth)
        for drafter, side in zip(self.drafters[1:], self._side_trees, strict=True):
            drafter.grow(side, width, depth)
            _merge(tree, side)


def _empty_like(tree: TokenTree) -> TokenTree:
    with torch.inference_mode(False):  # buffers made in inference mode could not be written outside it
        return TokenTree.allocate(tree.num_nodes, tree.candidates, tree.tokens.device)


def _merge(tree: TokenTree, side: TokenTree) -> None:
    """Add to ``tree`` what ``side``, a tree with the same root, has beyond it."""
    size = side.size
    if size == 1:
        return
    parents = side.parents[1:size]
    # A node's estimate is its score's fall from its parent's; its edge is what the drafter itself said.
    estimates = (side.scores[1:size] - side.scores[parents]).tolist()
    tree.graft(parents.tolist(), side.tokens[1:size].tolist(), estimates)
