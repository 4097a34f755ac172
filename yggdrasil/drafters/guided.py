"""A drafter under a constraint: forced tokens are the tree; where the text is free, what breaks the grammar is cut off.

The target's choice at every node is masked anyway, so this moves no token; it keeps rows of verification from being
spent on what cannot be accepted.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from yggdrasil.acceptance.grammar import Grammar
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.drafters.protocol import Drafter, num_kept
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree

_FORCED = -0.02  # log-probability of a forced token: the target may still spell the same text otherwise


class GuidedDrafter:
    """Any drafter, guided by the grammar of one request."""

    def __init__(self, drafter: Drafter, sampler: Sampler) -> None:
        assert sampler.grammar is not None
        self.name = f"{drafter.name}, guided"
        self.hidden_layers = drafter.hidden_layers
        self._drafter, self._sampler, self._grammar = drafter, sampler, sampler.grammar

    def begin(self, tokens: Sequence[int]) -> None:
        self._drafter.begin(tokens)

    def num_kept(self, tokens: Sequence[int]) -> int:
        return num_kept(self._drafter, tokens)

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        self._drafter.extend(tokens, hidden)

    def forced(self) -> list[int]:
        """Tokens that must follow the certain text."""
        return self._grammar.forced(self._sampler.tokens)

    def head(self, tree: TokenTree) -> None:
        """The drafter's head, or the root alone where tokens are forced: the drafter then reads it later."""
        if self.forced():
            tree.plant(self._sampler.tokens[-1])
        else:
            self._drafter.head(tree)

    def grow(self, tree: TokenTree, width: int, depth: int) -> None:
        """The forced tokens (no deeper than ``depth``); where there are none, grow and cut what may not follow."""
        forced = self.forced()[:depth]
        if forced:
            tree.graft(list(range(len(forced))), forced, [_FORCED] * len(forced))
            return
        self._drafter.grow(tree, width, depth)
        prune_forbidden(tree, self._grammar, self._sampler.tokens)


def prune_forbidden(tree: TokenTree, grammar: Grammar, text: Sequence[int]) -> int:
    """Take every node out of ``tree`` whose path breaks ``grammar`` after ``text``; returns how many were."""
    size = tree.size
    tokens, parents = tree.tokens[:size].tolist(), tree.parents[:size].tolist()
    children: list[list[int]] = [[] for _ in range(size)]
    for node in range(1, size):
        children[parents[node]].append(node)
    forbidden: list[int] = []
    pending: list[tuple[int, list[int]]] = [(child, list(text)) for child in children[0]]
    while pending:  # depth first: neighbouring questions share most of their path
        node, prefix = pending.pop()
        path = [*prefix, tokens[node]]
        if grammar.allows(path):
            pending.extend((child, path) for child in children[node])
        else:
            forbidden += _subtree(node, children)
    tree.scores[forbidden] = NO_SCORE
    return len(forbidden)


def _subtree(node: int, children: Sequence[Sequence[int]]) -> list[int]:
    nodes = [node]
    for found in nodes:
        nodes.extend(children[found])
    return nodes
