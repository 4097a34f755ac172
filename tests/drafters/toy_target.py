"""A deterministic function as target, and the decode loop over it: what every drafter must pass."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from integrity import check_tree

from yggdrasil.acceptance.greedy import accept_greedy
from yggdrasil.drafters.protocol import Budget, Drafter, propose_in
from yggdrasil.tree.token_tree import TokenTree

Target = Callable[[Sequence[int]], int]


class Decoded(NamedTuple):
    tokens: list[int]
    num_iterations: int


def wandering_target(text: Sequence[int]) -> int:
    """Repeats itself for a while, then moves on to another phrase."""
    return (3 * text[-1] + text[-2] + len(text) // 13) % 7


def plain_decode(target: Target, prompt: Sequence[int], num_tokens: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + num_tokens:
        text.append(target(text))
    return text[len(prompt) :]


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens below the root on the way to each node, in the order of the nodes."""
    return [tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in range(1, tree.size)]


def decode(drafter: Drafter, target: Target, prompt: Sequence[int], num_tokens: int, tree: TokenTree) -> Decoded:
    """Draft, verify and accept until ``num_tokens`` are certain; checks the drafter's contract on the way."""
    width, depth = 2, 4
    text = [*prompt, target(prompt)]
    drafter.begin(prompt)
    drafter.extend(text[-1:], {})
    num_iterations = 0
    while len(text) < len(prompt) + num_tokens:
        propose_in(drafter, tree, text[-1], Budget(depth, width))
        check_tree(tree)
        assert tree.tokens[0] == text[-1]
        assert tree.depths[: tree.size].max() <= depth
        choices = [target([*text, *path]) for path in [(), *paths(tree)]]
        choices += [0] * (tree.num_nodes - len(choices))
        exists = torch.isfinite(tree.scores)
        last, accepted = accept_greedy(tree.tokens, tree.parents, tree.ancestors, exists, torch.tensor(choices))
        certain = [*tree.tokens[accepted][1:].tolist(), choices[int(last)]]
        drafter.extend(certain, {})
        text += certain
        num_iterations += 1
    return Decoded(text[len(prompt) : len(prompt) + num_tokens], num_iterations)
