"""Randomness of one request: a function of the seed and of the place in the text, whatever is drafted.

Dims: V vocabulary.
"""

import secrets
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Purpose = Literal["target", "draft"]
_STREAMS: dict[Purpose, int] = {"target": 0, "draft": 1}


class Choice(NamedTuple):
    """A token, and by how much it won over the runner-up, in the units of the scores it was chosen by."""

    token: int
    margin: float


class Coins(Protocol):
    """Random decisions of one place."""

    def draw(self, scores: FloatArray) -> Choice:
        """A token with probability proportional to ``exp(scores)`` [V]."""

    def flip(self, probability: float) -> bool:
        """True with this probability."""


class CoinSource(Protocol):
    """Coins by place and purpose; those of different places or purposes are independent."""

    def at(self, position: int, purpose: Purpose) -> Coins:
        """Coins for the token at ``position``; the same place gives the same coins again."""


class SeededCoins:
    """Counter-based coins (Philox): nothing drawn at one place moves what is drawn at another."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def at(self, position: int, purpose: Purpose) -> "PhiloxCoins":
        # The low words count draws within a place, the high ones name the place.
        return PhiloxCoins(np.random.Philox(key=self.seed, counter=[0, 0, _STREAMS[purpose], position]))


class PhiloxCoins:
    """Coins of one place. Draws by the Gumbel-max rule, so that near ties have a margin and rounding rarely matters."""

    def __init__(self, generator: "np.random.Philox") -> None:
        self._generator = np.random.Generator(generator)

    def draw(self, scores: FloatArray) -> Choice:
        # -log of an exponential variable is a Gumbel variable; argmax(score + Gumbel) has the law softmax(score).
        return best_of(scores - np.log(self._generator.standard_exponential(scores.shape[0])))

    def flip(self, probability: float) -> bool:
        return bool(self._generator.random() < probability)


def best_of(scores: FloatArray) -> Choice:
    """The highest score (the first among equals) and its distance to the next, infinite where it is the only one."""
    token = int(scores.argmax())
    rest = max(scores[:token].max(initial=-np.inf), scores[token + 1 :].max(initial=-np.inf))
    return Choice(token, float(scores[token] - rest))


def fresh_seed() -> int:
    """A seed from the operating system, for requests that name none."""
    return secrets.randbits(63)
