"""Candidates drawn from the drafter, and the tests by which they leave the target's law as it is.

A child that was drawn with probability q is accepted with probability min(1, p / q); after a refusal the target's law
is what q has not covered, norm(max(p - q, 0)). This holds only for tokens really drawn from the q recorded with them,
in the order in which they were drawn, so both travel with the tree.

Dims: V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from yggdrasil.acceptance.coins import Coins, FloatArray

DrawKind = Literal["chain", "with replacement", "without replacement"]


@dataclass(frozen=True)
class NodeDraws:
    """Children drawn at one node."""

    tokens: tuple[int, ...]  # in the order drawn; a token may repeat only where draws are with replacement
    weights: FloatArray  # [V] float64, the distribution of the first draw; sums to 1


@dataclass(frozen=True)
class DrawnTree:
    """How the candidates of one tree were drawn; the tag that says which rule may accept them."""

    kind: DrawKind
    draws: dict[int, NodeDraws] = field(default_factory=dict)  # by node of the token tree


def draw_children(weights: FloatArray, count: int, kind: DrawKind, coins: Coins) -> NodeDraws:
    """Draw ``count`` children from ``weights`` [V], fewer where the distribution is exhausted.

    - ``chain`` and ``with replacement``: independent draws (SpecInfer's multi-round sampling);
    - ``without replacement``: each from what the earlier ones left, renormalised (Sequoia).
    """
    tokens: list[int] = []
    remaining = weights
    for _ in range(1 if kind == "chain" else count):
        if remaining.sum() <= 0:
            break
        tokens.append(coins.draw(_logarithm(remaining)).token)
        if kind == "without replacement":
            remaining = _without(remaining, tokens[-1])
    return NodeDraws(tuple(tokens), weights)


def accept_drawn(target: FloatArray, draws: NodeDraws, kind: DrawKind, coins: Coins) -> tuple[int | None, FloatArray]:
    """Test drawn children in order; returns (the accepted token or None, the law to draw from where none was).

    ``target`` [V] is the target's processed distribution at the node. Leviathan et al. 2023 for one draw, SpecInfer's
    algorithm 2 for several with replacement (q stays), Sequoia's for several without (q loses what was drawn).
    """
    law, weights = target, draws.weights
    for token in draws.tokens:
        if coins.flip(min(1.0, law[token] / weights[token])):
            return token, law
        law = residual(law, weights)
        if kind == "without replacement":
            weights = _without(weights, token)
    return None, law


def residual(law: FloatArray, weights: FloatArray) -> FloatArray:
    """norm(max(law - weights, 0)); ``law`` itself where rounding leaves nothing (then refusals have no probability)."""
    rest = np.maximum(law - weights, 0.0)
    total = rest.sum()
    return rest / total if total > 0 else law


def draw_from(law: FloatArray, coins: Coins) -> int:
    """A token with the probabilities ``law`` [V]."""
    return coins.draw(_logarithm(law)).token


def _without(weights: FloatArray, token: int) -> FloatArray:
    rest = weights.copy()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else rest


def _logarithm(law: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        logarithm: FloatArray = np.log(law)
    return logarithm
