"""What the depth predictor may read before a tree is grown. Numpy only.

Three parts, concatenated in this order: the target's hidden state at the end of the text; how the text repeats itself;
and the drafter's first guesses, which a head draft gives before any depth is chosen. All of them depend on the text
alone, never on the trees that were drafted before, so what is recorded offline is what decoding sees.

Dims: H hidden size, R repetition figures, K candidates of the root, F = H + R + K features.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from yggdrasil.predictor.repetition import NGRAM, Repetition

Float32Array: TypeAlias = npt.NDArray[np.float32]

NUM_REPETITION = 6  # R
_FAST, _SLOW = 0.3, 0.05  # how fast the hit rates forget
_NO_GUESS = -12.0  # log-probability of an absent candidate, the least that the drafter's calibration knows


class FeatureSizes(NamedTuple):
    """How many numbers of each part a predictor reads; 0 where it does not read that part."""

    hidden: int
    repetition: int
    head: int

    @property
    def total(self) -> int:
        """F."""
        return sum(self)


class Features(Protocol):
    """The present state of decoding; each part is computed on demand."""

    @property
    def context(self) -> int:
        """Tokens in the target's cache."""

    def hidden(self) -> Float32Array:
        """The target's hidden state that chose the last token, [H]."""

    def repetition(self) -> Float32Array:
        """How the text so far repeats itself, [R]."""

    def head(self) -> Float32Array:
        """The drafter's log-probabilities of the root's candidates, best first, [K]; only after a head draft."""


class RepetitionFigures:
    """A text's repetition in figures. Where it lasts, a drafter is right for as long."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is certain."""
        self.repetition = Repetition()
        self._followed = 0  # tokens that found the repetition, and those it told since
        self._since_miss = 0
        self._fast_rate = self._slow_rate = 0.0

    def resume(self, text: Sequence[int]) -> int:
        """Another ``text`` is certain; returns how many of its tokens are read: all so far, or none if it differs."""
        read = self.repetition.text
        if list(text[: len(read)]) != read:
            self.forget()
        return len(self.repetition.text)

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens are certain."""
        for token in tokens:
            is_hit = self.repetition.append(token)
            self._fast_rate += _FAST * (is_hit - self._fast_rate)
            self._slow_rate += _SLOW * (is_hit - self._slow_rate)
            self._since_miss = self._since_miss + 1 if is_hit else 0
            self._followed = self._followed + 1 if is_hit else NGRAM * (self.repetition.period > 0)

    def read(self) -> Float32Array:
        """Logs of the repetition's length, period and tokens since a miss; hit rates; whether one is on: [R]."""
        period = self.repetition.period
        return np.array(
            [
                log1p(self._followed), log1p(period), log1p(self._since_miss),
                self._fast_rate, self._slow_rate, period > 0,
            ],
            dtype=np.float32,
        )  # fmt: skip


def read_features(features: Features, sizes: FeatureSizes) -> Float32Array:
    """Features of a predictor of these sizes, [F]; parts of size 0 are not computed."""
    parts = []
    if sizes.hidden:
        parts.append(features.hidden())
    if sizes.repetition:
        parts.append(features.repetition())
    if sizes.head:
        parts.append(finite_head(features.head()))
    return np.concatenate(parts)


def finite_head(log_probabilities: npt.NDArray[np.floating[Any]]) -> Float32Array:
    """The root's candidates within the range that its calibration knows."""
    bounded: Float32Array = np.maximum(log_probabilities, _NO_GUESS, dtype=np.float32)
    return bounded


def repetition_figures(text: Sequence[int], first: int) -> Float32Array:
    """``RepetitionFigures.read`` after each of the tokens from ``first`` on, [len(text) - first, R]."""
    figures = RepetitionFigures()
    figures.extend(text[:first])
    rows = []
    for token in text[first:]:
        figures.extend([token])
        rows.append(figures.read())
    return np.stack(rows) if rows else np.zeros((0, NUM_REPETITION), dtype=np.float32)
