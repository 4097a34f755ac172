"""How a text repeats an earlier place, against a search at every token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.predictor.repetition import NGRAM, Repetition, count_repeated, repeated_share

SHORT = st.lists(st.integers(0, 2), max_size=30)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_a_repetition_is_followed_until_it_errs(text):
    repetition, period = Repetition(), 0
    for place, token in enumerate(text):
        is_hit = period > 0 and text[place - period] == token
        assert repetition.append(token) == is_hit
        if not is_hit:
            ngram = text[max(place + 1 - NGRAM, 0) : place + 1]
            ends = [end for end in range(NGRAM - 1, place) if text[end + 1 - NGRAM : end + 1] == ngram]
            period = place - ends[-1] if ends else 0
        assert repetition.period == period


def by_search(prompt, output):
    """The slow twin: look backwards from every generated place for the three tokens before it."""
    text, count = [*prompt, *output], 0
    for place in range(max(len(prompt), 3), len(text)):
        last = text[place - 3 : place]
        earlier = [end for end in range(3, place) if text[end - 3 : end] == last]
        count += bool(earlier) and text[earlier[-1]] == text[place]
    return count


@given(SHORT, SHORT)
def test_it_is_what_a_search_finds(prompt, output):
    assert count_repeated(prompt, output) == by_search(prompt, output)


@pytest.mark.parametrize(
    ("prompt", "output", "count"),
    [
        ([9, 8], [1, 2, 3, 4] * 3, 12 - 4 - 3),  # a loop, once it has come round
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], 3),  # a copy of the prompt, after three tokens
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], [5], 1),  # the last occurrence counts
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], [4], 0),
        ([], list(range(50)), 0),
        ([1], [], 0),
    ],
)
def test_examples_of_repeated_tokens(prompt, output, count):
    assert count_repeated(prompt, output) == count


def test_the_share_is_of_all_outputs_together():
    loop, fresh = ([9, 8], [1, 2, 3, 4] * 3), ([9], [5, 6, 7])
    assert repeated_share(iter([loop, fresh])) == (12 - 4 - 3) / 15
    assert repeated_share([]) == repeated_share([([1], [])]) == 0.0
