"""The inputs of the depth predictor, which are known before a tree is drafted. Numpy only.

The inputs have three parts, concatenated in this order: the target's hidden state of the last token; figures of the
text's repetition; and the drafter's log-probabilities of the first level, which its head draft computes before the
depth is chosen. All parts depend on the text alone, not on earlier trees, so features recorded offline equal those of
decoding.

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
_FAST, _SLOW = 0.3, 0.05  # weight of the newest token in the two moving hit rates
_NO_GUESS = -12.0  # log-probability of an absent candidate, the lowest knot of the acceptance calibration


class FeatureSizes(NamedTuple):
    """Sizes of the three parts of a predictor's input; 0 for a part that it does not read."""

    hidden: int
    repetition: int
    head: int  # log-probabilities of the head draft's candidates

    @property
    def total(self) -> int:
        """F, the sum of the three sizes."""
        return sum(self)


class Features(Protocol):
    """The features of the current position. Each part is computed on demand, so unread parts cost nothing."""

    @property
    def context(self) -> int:
        """Number of tokens in the target's KV cache, which has all committed tokens but the last."""

    def hidden(self) -> Float32Array:
        """Return the target's hidden state from which the last committed token was chosen, [H] float32."""

    def repetition(self) -> Float32Array:
        """Return six numbers on how the end of the text repeats an earlier part of it, [6] float32.

        ``RepetitionFigures.read`` explains them.
        """

    def head(self) -> Float32Array:
        """Return the drafter's log-probabilities of the K likeliest tokens after the text, descending, [K] float32.

        Entries are -inf if there are fewer than K. The head draft, which computes them, must have run.
        """


class RepetitionFigures:
    """Tracks how a text repeats itself, as six numbers. While a repetition lasts, drafts are usually accepted."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Clear the text and the numbers on its repetition."""
        self.repetition = Repetition()
        self._followed = 0  # length of the current repetition in tokens
        self._since_miss = 0
        self._fast_rate = self._slow_rate = 0.0

    def resume(self, text: Sequence[int]) -> int:
        """Return the number of tokens already read if ``text`` begins with all of them; else clear all and return 0.

        The caller passes the tokens of ``text`` after these to ``extend``.
        """
        read = self.repetition.text
        if list(text[: len(read)]) != read:
            self.forget()
        return len(self.repetition.text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append token ids to the text and update the numbers."""
        for token in tokens:
            is_hit = self.repetition.append(token)
            self._fast_rate += _FAST * (is_hit - self._fast_rate)
            self._slow_rate += _SLOW * (is_hit - self._slow_rate)
            self._since_miss = self._since_miss + 1 if is_hit else 0
            self._followed = self._followed + 1 if is_hit else NGRAM * (self.repetition.period > 0)

    def read(self) -> Float32Array:
        """Return six numbers on how the end of the text repeats an earlier part, [6] float32.

        They are log1p of the repetition's length, of its distance (period), and of the number of tokens in a row that
        were predicted; a fast and a slow exponential moving average of the share of tokens predicted; and 1 if a
        repetition is going on, else 0. Lengths and distances are in tokens.
        """
        period = self.repetition.period
        return np.array(
            [
                log1p(self._followed), log1p(period), log1p(self._since_miss),
                self._fast_rate, self._slow_rate, period > 0,
            ],
            dtype=np.float32,
        )  # fmt: skip


def read_features(features: Features, sizes: FeatureSizes) -> Float32Array:
    """Return the input of the depth predictor, [F] float32: ``hidden``, ``repetition`` and ``head`` of ``features``.

    The parts are concatenated in this order. A part whose size in ``sizes`` is 0 is neither computed nor included.
    """
    parts = []
    if sizes.hidden:
        parts.append(features.hidden())
    if sizes.repetition:
        parts.append(features.repetition())
    if sizes.head:
        parts.append(finite_head_features(features.head()))
    return np.concatenate(parts)


def finite_head_features(log_probabilities: npt.NDArray[np.floating[Any]]) -> Float32Array:
    """Return ``Features.head`` as float32 for the predictor, same shape; values below -12, such as -inf, become -12."""
    bounded: Float32Array = np.maximum(log_probabilities, _NO_GUESS, dtype=np.float32)
    return bounded


def repetition_figures(text: Sequence[int], first: int) -> Float32Array:
    """Return the six numbers of ``RepetitionFigures.read`` after each token from index ``first`` on.

    Row i of the result, [len(text) - first, 6] float32, is for the text up to and with token ``first + i``.
    """
    figures = RepetitionFigures()
    figures.extend(text[:first])
    rows = []
    for token in text[first:]:
        figures.extend([token])
        rows.append(figures.read())
    return np.stack(rows) if rows else np.zeros((0, NUM_REPETITION), dtype=np.float32)
