"""What one iteration drafted, verified and kept, for whoever watches a request."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.engine.iteration import Iteration
from yggdrasil.tree.token_tree import TokenTree


@dataclass(frozen=True)
class SeenTree:
    """The tree of an iteration, a copy. Node 0 is the last certain token; a plain step has no other."""

    drafter: str  # who guessed, several with " + " between them; "none" for a plain step
    tokens: list[int]
    parents: list[int]
    verified: list[int]  # nodes that the target's pass read
    accepted: list[int]  # those on the path that stood, the root first
    bonus: int  # the token that the target added
    drafted: int = 0  # nodes that the drafter attached, which come first; those behind them are n-grams' guesses


Watch = Callable[[SeenTree], None]


def seen_tree(tree: TokenTree, order: Tensor, state: Iteration, guessers: str) -> SeenTree:
    """The iteration as it is after acceptance, before anything is planted anew."""
    outcome = state.outcome
    assert outcome is not None
    if not state.verifies_tree:
        return SeenTree("none", [state.root], [0], [0], [0], outcome.tokens[-1])
    size = int(torch.isfinite(tree.scores).sum())
    verified = [node for node in order[: state.shape.verify_width].tolist() if node < size]
    tokens, parents = tree.tokens[:size].tolist(), tree.parents[:size].tolist()
    drafted = min(size - 1, state.shape.width * state.shape.depth)
    return SeenTree(guessers, tokens, parents, verified, list(outcome.nodes), outcome.tokens[-1], drafted)
