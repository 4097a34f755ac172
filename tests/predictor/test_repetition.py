"""What the text itself says comes next, against a copy token by token; and how often it was right so far."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.predictor.repetition import NGRAM, Repetition

LOOP = [7, 8, 9, 4]


def read(text):
    repetition = Repetition()
    for token in text:
        repetition.append(token)
    return repetition


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 70))
def test_a_continuation_copies_from_the_period_before(text, count):
    repetition = read(text)
    period, copied = repetition.period, list(text)
    if period:
        for _ in range(count):
            copied.append(copied[-period])

    assert repetition.continuation(count) == copied[len(text) :]
    assert len(repetition.survival(count)) == (count if period else 0)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_the_length_is_what_agrees_with_the_period_before(text):
    """A repetition that was found late is as long as one that was followed from its beginning."""
    repetition = read(text)
    agreeing = 0
    while agreeing < len(text) - repetition.period and text[-1 - agreeing] == text[-1 - agreeing - repetition.period]:
        agreeing += 1

    if repetition.period:
        assert NGRAM <= repetition.length <= agreeing
    else:
        assert repetition.length == 0


def test_a_repetition_is_measured_where_it_is_found():
    """After a token that parted two copies, the second one agrees from its own beginning."""
    copied = list(range(20, 40))
    text = [*copied, 5, *copied, 6, *copied[:10]]
    assert read(text).length == 10


def test_what_was_right_before_is_likelier():
    """The first token's estimate is the share of right guesses at such lengths; a class before it was seen trusts."""
    fresh, proven = read(LOOP * 2), read(LOOP * 12)
    broken = read([*LOOP * 2, 1, *LOOP[1:], 2, *LOOP[1:], 3, *LOOP[1:], 5, *LOOP[1:]])

    assert broken.length == fresh.length - 1 == NGRAM
    assert broken.survival(1)[0] < 0.6 < 0.7 < fresh.survival(1)[0] < 0.9 < proven.survival(1)[0] < 1.0


def test_estimates_multiply_with_the_length_that_will_have_agreed():
    """Four agree: rates of 4 to 7, then of 8 to 15, none seen but of 3 (right once of once)."""
    repetition = read(LOOP * 2)
    assert repetition.length == 4
    expected = [(4 / 5) ** min(level, 4) * (8 / 9) ** max(level - 4, 0) for level in range(1, 9)]

    assert repetition.survival(8) == pytest.approx(expected)


def test_old_errors_are_forgotten():
    """A class that erred often and then was right two hundred times is trusted as one that never erred."""
    repetition = Repetition()
    repetition._right[3], repetition._graded[3] = 0.0, 40.0
    distrusted = repetition._rate(3)
    for _ in range(200):
        repetition.length = 8
        repetition._grade(True)

    assert distrusted < 0.2
    assert repetition._rate(3) > 0.9
