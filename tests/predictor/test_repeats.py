"""What an earlier place of the text gives away."""

from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.predictor.repeats import foretold, share_foretold

SHORT = st.lists(st.integers(0, 2), max_size=30)


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
    assert foretold(prompt, output) == by_search(prompt, output)


def test_a_loop_is_foretold_once_it_has_come_round():
    assert foretold([9, 8], [1, 2, 3, 4] * 3) == 12 - 4 - 3


def test_a_copy_from_the_prompt_is_foretold_after_three_tokens():
    assert foretold([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]) == 3


def test_the_last_occurrence_counts():
    """1 2 3 went on with 4 and then with 5: only 5 is foretold."""
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]

    assert foretold(text, [5]) == 1
    assert foretold(text, [4]) == 0


def test_text_that_never_repeats_gives_nothing_away():
    assert foretold([], list(range(50))) == 0
    assert foretold([1], []) == 0


def test_the_share_is_of_all_outputs_together():
    loop, fresh = ([9, 8], [1, 2, 3, 4] * 3), ([9], [5, 6, 7])
    assert share_foretold(iter([loop, fresh])) == (12 - 4 - 3) / 15
    assert share_foretold([]) == share_foretold([([1], [])]) == 0.0
