"""Reweigh candidates by the target's random draws, which are known before the target runs.

A sampling target takes the token with the highest log p + Gumbel noise, and the noise depends only on the request's
seed, the position and the token. So a candidate with much noise is likelier to be drawn than its probability says. The
drafts never change which tokens are drawn.

The probability of a candidate with the scorer's probability q and the noise g is q exp(NOISE g) / sum. All other tokens
together have the weight (1 - sum of q) exp(OTHERS): the scorer is fitted to greedy text, and sampled tokens are more
often new. Both constants were fitted to answers of three small models at temperatures 0.7 and 1 (docs/sampling.md).
"""

from typing import NamedTuple

from yggdrasil.acceptance.coins import draw_key

_NOISE, _OTHERS = 0.65, 1.28  # at temperature 1
_HOTTEST = 1.5  # higher temperatures are weighed as this one


class Draws(NamedTuple):
    """Key and weight of a sampling request's Gumbel noise, and the log-weight of all tokens that are no candidates."""

    key: int
    noise: float
    others: float

    @classmethod
    def of(cls, seed: int, temperature: float) -> "Draws":
        """Return key and weights of the noise for a request that samples with ``seed`` at ``temperature`` (above 0)."""
        warmth = min(temperature, _HOTTEST)
        return cls(draw_key(seed), min(_NOISE * warmth**1.5, 1.0), _OTHERS * warmth**4)


NO_DRAWS = Draws(0, 0.0, 0.0)

NOTHING_DRAWN = (0.0, 0.0, 0.0)


def draft_weights(temperature: float) -> tuple[float, float, float]:
    """Return the weights by which draft models and heads reweigh their candidates for a target that samples.

    Returns:
        The factor of the drafter's log-probabilities (1 / ``temperature``), the factor of the target's noise (1), and
            the log-weight of all tokens that are not candidates. ``temperature`` must be above 0.
    """
    return 1.0 / temperature, 1.0, _OTHERS * min(temperature, _HOTTEST) ** 4
