"""How the end of a text repeats an earlier place, against looking for it anew at every token."""

from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.predictor.repetition import NGRAM, Repetition


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
