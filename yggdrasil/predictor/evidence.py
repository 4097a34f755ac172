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

Float32Array: TypeAlias = npt.NDArray[np.float32]

NGRAM = 3  # tokens that must agree before a repetition is suspected
NUM_REPETITION = 6  # R
_FAST, _SLOW = 0.3, 0.05  # how fast the hit rates forget
_NO_GUESS = -12.0  # log-probability of an absent candidate, the least that the drafter's calibration knows


class EvidenceSizes(NamedTuple):
    """How many numbers of each part a predictor reads; 0 where it does not read that part."""

    hidden: int
    repetition: int
    head: int

    @property
    def total(self) -> int:
        """F."""
        return sum(self)


class Evidence(Protocol):
    """The present state of decoding; each part is computed when asked for, so what is not read costs nothing."""

    @property
    def context(self) -> int:
        """Tokens in the target's cache."""

    def hidden(self) -> Float32Array:
        """The target's hidden state that chose the last token, [H]."""

    def repetition(self) -> Float32Array:
        """How the text so far repeats itself, [R]."""

    def head(self) -> Float32Array:
        """The drafter's log-probabilities of the root's candidates, best first, [K]; only after a head draft."""


class Repetition:
    """How the end of a text repeats an earlier place of it, one dictionary look-up a token.

    Greedy text falls into loops and copies from its prompt; there a drafter is right for as long as the loop lasts.
    A repetition is suspected where the last ``NGRAM`` tokens have occurred before, and followed until it errs.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._followers: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self._guess = -1  # index of the token that should come next, -1 where nothing repeats
        self._matched = self._since_miss = 0
        self._fast_rate = self._slow_rate = 0.0

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens are certain."""
        for token in tokens:
            self._append(token)

    def figures(self) -> Float32Array:
        """Logs of the repetition's length, period and tokens since a miss; hit rates; whether one is on: [R]."""
        period = len(self._text) - self._guess if self._guess >= 0 else 0
        return np.array(
            [
                log1p(self._matched), log1p(period), log1p(self._since_miss),
                self._fast_rate, self._slow_rate, self._guess >= 0,
            ],
            dtype=np.float32,
        )  # fmt: skip

    def _append(self, token: int) -> None:
        is_hit = self._guess >= 0 and self._text[self._guess] == token
        self._fast_rate += _FAST * (is_hit - self._fast_rate)
        self._slow_rate += _SLOW * (is_hit - self._slow_rate)
        self._since_miss = self._since_miss + 1 if is_hit else 0
        self._text.append(token)
        if is_hit:
            self._matched += 1
            self._guess += 1
        ngram = tuple(self._text[-NGRAM:])
        if not is_hit:
            self._guess = self._followers.get(ngram, -1)
            self._matched = NGRAM if self._guess >= 0 else 0
        if len(ngram) == NGRAM:
            self._followers[ngram] = len(self._text)


def read_evidence(evidence: Evidence, sizes: EvidenceSizes) -> Float32Array:
    """Features of a predictor of these sizes, [F]; parts of size 0 are not asked for."""
    parts = []
    if sizes.hidden:
        parts.append(evidence.hidden())
    if sizes.repetition:
        parts.append(evidence.repetition())
    if sizes.head:
        parts.append(finite_head(evidence.head()))
    return np.concatenate(parts)


def finite_head(log_probabilities: npt.NDArray[np.floating[Any]]) -> Float32Array:
    """The drafter's first guesses within the range that its calibration knows."""
    bounded: Float32Array = np.maximum(log_probabilities, _NO_GUESS, dtype=np.float32)
    return bounded


def repetition_figures(text: Sequence[int], first: int) -> Float32Array:
    """``Repetition.figures`` after each of the tokens from ``first`` on, [len(text) - first, R]."""
    repetition = Repetition()
    repetition.extend(text[:first])
    rows = []
    for token in text[first:]:
        repetition.extend([token])
        rows.append(repetition.figures())
    return np.stack(rows) if rows else np.zeros((0, NUM_REPETITION), dtype=np.float32)
