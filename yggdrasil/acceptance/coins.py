"""Randomness of one request: a function of the seed and of the place in the text, whatever is drafted.

Dims: V vocabulary.
"""

import secrets
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from yggdrasil.acceptance.random_numbers import gumbel_noise, key_of, uniform_number

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
    """Counter-based coins: nothing drawn at one place moves what is drawn at another."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def at(self, position: int, purpose: Purpose) -> "PlaceCoins":
        return PlaceCoins(self.seed, position, purpose)


class PlaceCoins:
    """Coins of one place; each draw and each flip has a stream of numbers of its own.

    Draws by the Gumbel-max rule, so that near ties have a margin and rounding rarely matters. The first draw of a place
    is what captured steps compute on their device.
    """

    def __init__(self, seed: int, position: int, purpose: Purpose) -> None:
        self._seed, self._position, self._purpose = seed, position, purpose
        self._used = 0

    def draw(self, scores: FloatArray) -> Choice:
        possible = np.flatnonzero(scores > -np.inf)  # the others need no noise
        key, position = torch.tensor([self._key()]), torch.tensor([self._position])
        noise = gumbel_noise(key, position, torch.from_numpy(possible))
        sums = np.full(scores.shape, -np.inf)
        # Summed in float32, as captured steps do.
        sums[possible] = scores[possible].astype(np.float32) + noise.numpy()
        return best_of(sums)

    def flip(self, probability: float) -> bool:
        return uniform_number(self._key(), self._position) < probability

    def _key(self) -> int:
        key = draw_key(self._seed, self._purpose, self._used)
        self._used += 1
        return key


def draw_key(seed: int, purpose: Purpose = "target", number: int = 0) -> int:
    """The key of the random numbers, an int64, of a place's draw or flip ``number``."""
    return key_of(seed, len(_STREAMS) * number + _STREAMS[purpose])


def best_of(scores: FloatArray) -> Choice:
    """The highest score (the first among equals) and its distance to the next, infinite where it is the only one."""
    token = int(scores.argmax())
    rest = max(scores[:token].max(initial=-np.inf), scores[token + 1 :].max(initial=-np.inf))
    return Choice(token, float(scores[token] - rest))


def fresh_seed() -> int:
    """A seed from the operating system, for requests that name none."""
    return secrets.randbits(63)
