"""Speculative sampling: draw candidates from the drafter, and accept them so that the target's distribution is kept.

A child drawn with probability q is accepted with probability min(1, p / q). After a rejection the target distribution
becomes the residual norm(max(p - q, 0)). This is exact only for tokens drawn from the recorded q, tested in the order
in which they were drawn, so ``DrawnTree`` records both.

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

    tokens: tuple[int, ...]  # in the order drawn; a token may repeat only if draws are with replacement
    weights: FloatArray  # [V] float64, the distribution of the first draw; sums to 1


@dataclass(frozen=True)
class DrawnTree:
    """Record of how the candidates of one tree were drawn; ``kind`` decides which acceptance rule is valid."""

    kind: DrawKind
    draws: dict[int, NodeDraws] = field(default_factory=dict)  # by node of the token tree


def draw_children(weights: FloatArray, count: int, kind: DrawKind, coins: Coins) -> NodeDraws:
    """Draw children of a tree node from the drafter's distribution, each by one draw of ``coins``.

    Args:
        weights: [V] float64 distribution, sums to 1.
        count: number of draws; "chain" ignores it.
        kind: "chain" draws once. "with replacement" draws independently (SpecInfer's multi-round sampling). "without
            replacement" removes each drawn token and renormalises the rest (Sequoia); it stops early if fewer than
            ``count`` tokens are possible.
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
    """Test the drawn children of a node in order, by one flip of ``coins`` each, and accept the first that passes.

    Return (the accepted token, or None if all are rejected; the residual distribution, [V] float64, after the
    rejections). If no child is accepted, the caller draws the next token from the residual distribution. One draw is
    tested as in Leviathan et al. 2023, several draws with replacement as in SpecInfer's algorithm 2 (q is unchanged),
    and several draws without replacement as in Sequoia (drawn tokens are removed from q).

    Args:
        target: [V] float64, the target's processed distribution at the node.
        draws: the children in the order drawn, and the distribution of the first draw.
        kind: how the children were drawn, as in ``draw_children``.
    """
    law, weights = target, draws.weights
    for token in draws.tokens:
        if coins.flip(min(1.0, law[token] / weights[token])):
            return token, law
        law = _residual(law, weights)
        if kind == "without replacement":
            weights = _without(weights, token)
    return None, law


def _residual(law: FloatArray, weights: FloatArray) -> FloatArray:
    """Return norm(max(law - weights, 0)), [V]; ``law`` if no entry is positive: a rejection is impossible then."""
    rest = np.maximum(law - weights, 0.0)
    total = rest.sum()
    return rest / total if total > 0 else law


def draw_token(probabilities: FloatArray, coins: Coins) -> int:
    """Draw a token id with ``probabilities`` [V], which sum to 1, by one draw of ``coins``."""
    return coins.draw(_logarithm(probabilities)).token


def _without(weights: FloatArray, token: int) -> FloatArray:
    """Return ``weights`` with ``token`` removed, renormalised; all zeros if no other token is possible."""
    rest = weights.copy()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else rest


def _logarithm(law: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        logarithm: FloatArray = np.log(law)
    return logarithm
