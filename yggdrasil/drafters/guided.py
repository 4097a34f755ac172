"""Drafters under a constraint: tokens that must follow are guesses like any others; what breaks the grammar is cut off.

The target's choice at every node is masked anyway, so this moves no token; it keeps rows of verification from being
spent on what cannot be accepted.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from yggdrasil.acceptance.grammar import Grammar
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.drafters.protocol import Drafter, FreeDrafter, num_kept
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

    def head(self, tree: TokenTree) -> None:
        self._drafter.head(tree)

    def grow(self, tree: TokenTree, width: int, depth: int) -> None:
        """Grow and cut what may not follow."""
        self._drafter.grow(tree, width, depth)
        prune_forbidden(tree, self._grammar, self._sampler.tokens)


class GuidedGuesses:
    """The tokens that a request's grammar forces; where the text is free, those of ``free``, if any, that it allows.

    Drafted trees are left as they are: whoever grows them cuts them.
    """

    def __init__(self, free: FreeDrafter | None, sampler: Sampler) -> None:
        assert sampler.grammar is not None
        self.name = "grammar" if free is None else f"{free.name}, guided"
        self._free, self._sampler, self._grammar = free, sampler, sampler.grammar

    def begin(self, tokens: Sequence[int]) -> None:
        if self._free is not None:
            self._free.begin(tokens)

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        if self._free is not None:
            self._free.extend(tokens, hidden)

    def plant(self, tree: TokenTree, depth: int) -> None:
        forced = self._grammar.forced(self._sampler.tokens)[:depth]
        if forced or self._free is None:
            tree.plant(self._sampler.tokens[-1])
            tree.graft(list(range(len(forced))), forced, [_FORCED] * len(forced))
            return
        self._free.plant(tree, depth)
        prune_forbidden(tree, self._grammar, self._sampler.tokens)

    def fill(self, tree: TokenTree, depth: int) -> None:
        """Nothing."""


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
