"""What the predictor reads: how a text repeats itself, against a scan of the whole text; parts that are not read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.predictor.features import (
    NUM_REPETITION,
    FeatureSizes,
    RepetitionFigures,
    finite_head_features,
    read_features,
    repetition_figures,
)
from yggdrasil.predictor.repetition import NGRAM


def slow_guess(text):
    """Index of the token that should come next: a repetition is followed until it errs, then looked for anew."""
    guess = -1
    for end in range(1, len(text) + 1):
        if guess >= 0 and text[guess] == text[end - 1]:
            guess += 1
            continue
        earlier = [i + NGRAM for i in range(end - NGRAM) if text[i : i + NGRAM] == text[end - NGRAM : end]]
        guess = max(earlier, default=-1) if end >= NGRAM else -1
    return guess


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 5))
def test_figures_are_those_of_a_scan(text, split):
    repetition = RepetitionFigures()
    repetition.extend(text[:split])
    repetition.extend(text[split:])
    figures, guess = repetition.read(), slow_guess(text)

    assert figures.shape == (NUM_REPETITION,)
    assert figures[5] == (guess >= 0)
    assert np.expm1(figures[1]) == pytest.approx(len(text) - guess if guess >= 0 else 0, rel=1e-4)


def test_a_loop_is_seen_and_its_end_too():
    repetition = RepetitionFigures()
    repetition.extend([7, 8, 9, 4] * 5)
    inside = repetition.read()
    repetition.extend([1])
    outside = repetition.read()

    assert np.expm1(inside[:3]) == pytest.approx([16, 4, 13], rel=1e-5)  # three tokens found it, thirteen followed
    assert inside[3] > 0.9
    assert np.expm1(outside[:3]) == pytest.approx([0, 0, 0])
    assert outside[3] < inside[3]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.data())
def test_recorded_figures_are_the_running_ones(text, data):
    first = data.draw(st.integers(0, len(text)))
    running = RepetitionFigures()
    running.extend(text[:first])
    rows = repetition_figures(text, first)

    assert rows.shape == (len(text) - first, NUM_REPETITION)
    for token, row in zip(text[first:], rows, strict=True):
        running.extend([token])
        assert (running.read() == row).all()


class Part:
    """Features with a number for each part, some of which must not be asked for."""

    context = 5

    def __init__(self, **parts):
        self._parts = parts

    def hidden(self):
        return self._parts["hidden"]

    def repetition(self):
        return self._parts["repetition"]

    def head(self):
        return self._parts["head"]


def test_parts_come_in_order_and_unread_ones_are_not_asked_for():
    one, two = np.ones(1, dtype=np.float32), np.full(2, 2, dtype=np.float32)
    head = np.array([-0.5, -np.inf, -30.0], dtype=np.float32)

    assert read_features(Part(hidden=one, repetition=two), FeatureSizes(1, 2, 0)).tolist() == [1, 2, 2]
    assert read_features(Part(head=head), FeatureSizes(0, 0, 3)).tolist() == [-0.5, -12, -12]
    assert finite_head_features(head).dtype == np.float32
