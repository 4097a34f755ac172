"""Drafting under a grammar: drafts forced tokens and removes other drafters' candidates that the grammar forbids.

The target's logits are masked at every node in any case, so this does not change the output. It only saves verifying
candidates that cannot be accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from yggdrasil.acceptance.grammar import Grammar
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.drafters.protocol import Budget, Capabilities, Drafter, Step, is_model_free, propose_in
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree

_FORCED = -0.02  # log-probability of a forced token: the target may tokenise the same text differently


class GrammarDrafter:
    """Drafter of a request with a grammar: it drafts tokens that the grammar forces, or lets ``inner`` draft.

    Nodes of ``inner`` that the grammar forbids are removed. ``sampler`` has the request's grammar and generated tokens.
    """

    def __init__(self, sampler: Sampler, inner: Drafter | None) -> None:
        assert sampler.grammar is not None
        self.name = "grammar" if inner is None else f"{inner.name}, guided"
        self._inner, self._sampler, self._grammar = inner, sampler, sampler.grammar
        self._forces = inner is None or is_model_free(inner)
        self.capabilities = Capabilities(plants_root=True)
        if inner is not None and not self._forces:
            steps = inner.capabilities.steps
            without_tail = None if steps is None else replace(steps, tail=None)
            self.capabilities = replace(inner.capabilities, plants_root=True, steps=without_tail)

    def begin(self, tokens: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.begin(tokens)

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        if self._inner is not None:
            self._inner.extend(tokens, states)

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Attach nodes that the grammar allows, at most ``budget.depth`` levels.

        If ``budget.is_first``, the tree is first replaced by its root. An inner drafter that runs a model always
        drafts. A model-free inner drafter, or none, changes nothing unless ``budget.is_first``. In that case the tokens
        that the grammar forces next are attached as a chain; if the grammar forces none, the inner drafter drafts, if
        there is one.

        The inner drafter's nodes that violate the grammar are removed with their descendants.
        """
        root = self._sampler.tokens[-1]
        if self._forces:
            if not budget.is_first:
                return
            forced = self._grammar.forced(self._sampler.tokens)[: budget.depth]
            if forced or self._inner is None:
                tree.plant(root)
                tree.graft(list(range(len(forced))), forced, [_FORCED] * len(forced))
                return
        assert self._inner is not None
        propose_in(self._inner, tree, root, budget)
        prune_forbidden(tree, self._grammar, self._sampler.tokens)

    def cost(self, budget: Budget) -> Sequence[Step]:
        return () if self._inner is None else self._inner.cost(budget)


def prune_forbidden(tree: TokenTree, grammar: Grammar, text: Sequence[int]) -> int:
    """Remove the tree nodes whose path violates ``grammar``, with their descendants, and return how many were removed.

    A removed node gets the score NO_SCORE (-inf), so that it is not verified.

    Args:
        text: generated tokens so far, without the prompt, the root last.
    """
    size = tree.size
    tokens, parents = tree.tokens[:size].tolist(), tree.parents[:size].tolist()
    children: list[list[int]] = [[] for _ in range(size)]
    for node in range(1, size):
        children[parents[node]].append(node)
    forbidden: list[int] = []
    pending: list[tuple[int, list[int]]] = [(child, list(text)) for child in children[0]]
    while pending:  # depth first, because consecutive queries then share most of their path
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
