"""Random decisions of one request: functions of the seed and the position in the text, independent of the drafts.

Dims: V vocabulary.
"""

import secrets
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.native.random_numbers import gumbel_noise_at, key_of, uniform_number

FloatArray = npt.NDArray[np.float64]
Purpose = Literal["target", "draft"]
_STREAMS: dict[Purpose, int] = {"target": 0, "draft": 1}


class Choice(NamedTuple):
    """A chosen token, and the difference between its score and the second highest score."""

    token: int
    margin: float


class SeededCoins:
    """Random decisions by position and purpose; decisions at different positions or purposes are independent.

    The generator is counter-based: a draw at one position does not change draws at others.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._key, self._margin = draw_key(seed), torch.zeros(1, dtype=torch.float64)

    def at(self, position: int, purpose: Purpose) -> "Coins":
        """Return a new source of random decisions for one token.

        Its draws and flips begin again: equal arguments, and equal calls in equal order, give equal results.

        Args:
            position: index of the token in the text, prompt included.
            purpose: "target" for the target's choices, "draft" for sampled drafts.
        """
        return Coins(self.seed, position, purpose)

    def choose(self, logits: Tensor, params: SamplingParams, position: int) -> Choice | None:
        """Return the target's choice at ``position``, by one native call, or None if the caller must use ``at``.

        The choice is the first draw of ``at(position, "target")`` from the scores that temperature, top-k, top-p and
        min-p of ``params`` give for ``logits``, [V] on the CPU; other parameters are not used. The result is None if a
        rounding error might change the choice, if ``logits`` are neither bfloat16 nor float32, or if the largest logit
        is not finite.
        """
        if logits.dtype not in (torch.bfloat16, torch.float32):
            return None
        by = params.temperature, params.top_k, params.top_p, params.min_p
        token: int = torch.ops.yggdrasil.drawn_token(logits.contiguous(), *by, self._key, position, self._margin)
        return Choice(token, float(self._margin)) if token >= 0 else None


class Coins:
    """Random decisions at one position; each draw and each flip uses its own random stream.

    Tokens are drawn by the Gumbel-max rule, so rounding changes a draw only at near ties. Captured steps compute the
    first draw of a position on their device.
    """

    def __init__(self, seed: int, position: int, purpose: Purpose) -> None:
        self._seed, self._position, self._purpose = seed, position, purpose
        self._used = 0

    def draw(self, scores: npt.NDArray[np.floating[Any]]) -> Choice:
        """Draw a token with probability proportional to ``exp(scores)``; every call draws anew.

        The result's margin is the difference between the two highest sums of a score and its Gumbel noise.

        Args:
            scores: [V] log-probabilities up to a constant, float32 or rounded to it; -inf for impossible tokens.
        """
        given = torch.from_numpy(scores.astype(np.float32, copy=False))
        key, tokens = self._key(), torch.empty(given.shape, dtype=torch.int64)
        count = torch.ops.yggdrasil.likely_draws(given, key, self._position, tokens)
        few = tokens[:count]  # computing the noise of a whole vocabulary takes as long as a small model
        # Summed in float32, as captured steps do.
        best = best_of((given[few] + gumbel_noise_at(key, self._position, few)).numpy())
        return Choice(int(few[best.token]), best.margin)

    def flip(self, probability: float) -> bool:
        """Return True with the given ``probability``, 0 to 1, independently of all other draws and flips."""
        return uniform_number(self._key(), self._position) < probability

    def _key(self) -> int:
        key = draw_key(self._seed, self._purpose, self._used)
        self._used += 1
        return key


def draw_key(seed: int, purpose: Purpose = "target", number: int = 0) -> int:
    """Return the int64 key of a random decision, which ``gumbel_noise`` or ``uniform_number`` takes with a position.

    Args:
        purpose: "target" for the target's choices, "draft" for sampled drafts.
        number: how many decisions (drawn tokens and coin flips) of this purpose precede the decision at the position.
    """
    return key_of(seed, len(_STREAMS) * number + _STREAMS[purpose])


def best_of(scores: npt.NDArray[np.floating[Any]]) -> Choice:
    """Return the argmax token of ``scores`` [V] (the first of equals) and its margin, inf if all others are -inf."""
    token = int(scores.argmax())
    rest = max(scores[:token].max(initial=-np.inf), scores[token + 1 :].max(initial=-np.inf))
    return Choice(token, float(scores[token] - rest))


def fresh_seed() -> int:
    """Return a random 63-bit seed from the operating system, for requests without a seed."""
    return secrets.randbits(63)
