"""A growing answer is delivered completely and in order, the first text together with the beginning if possible."""

from types import SimpleNamespace

import pytest

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.serving import answer_delivery as module
from yggdrasil.serving.answer_delivery import AnswerDelivery
from yggdrasil.serving.jobs import Finished, Job, Piece


@pytest.fixture(autouse=True)
def rests(monkeypatch):
    """The rests that were taken, without taking them."""
    taken = []
    monkeypatch.setattr(module, "sleep", taken.append)
    return taken


def delivered(texts, *, is_streamed=True, whole=None, logprobs=(), scored=()):
    """The pieces of an answer whose iterations gave ``texts``."""
    events, known = [], []
    options = {"sampling": SamplingParams(logprobs=0)} if logprobs else {}
    teller = AnswerDelivery(Job([1], options, events.append, is_streamed), scored)
    request = SimpleNamespace(logprobs=lambda start: known[start:])
    for number, text in enumerate(texts):
        known += logprobs[number : number + 1]
        teller.emit_new(text, request)
    result = SimpleNamespace(text="".join(texts) if whole is None else whole, logprobs=list(logprobs) or None)
    teller.end(result)
    assert isinstance(events[-1], Finished)
    assert all(isinstance(event, Piece) for event in events[:-1])
    return events[:-1]


def test_a_long_prompt_is_told_of_before_there_is_text(rests):
    pieces = delivered(["", "", "", "a", "", "b"])

    assert [piece.text for piece in pieces] == ["", "a", "b"]
    assert len(rests) == 1


def test_a_prompt_that_is_read_at_once_is_told_with_its_first_text():
    assert [piece.text for piece in delivered(["", "a", "b"])] == ["a", "b"]


def test_what_is_scored_comes_first_and_each_log_probability_once():
    pieces = delivered(["a"] * 7, logprobs=[f"of {i}" for i in range(7)], scored=["scored"])

    assert [entry for piece in pieces for entry in piece.logprobs] == ["scored", *(f"of {i}" for i in range(7))]


def test_what_the_end_brings_to_light_is_told():
    """Half a character that the last token left, or an answer that was cut."""
    assert "".join(piece.text for piece in delivered(["a", "b"], whole="abc\ufffd")) == "abc\ufffd"


def test_without_a_stream_only_the_whole_is_told(rests):
    assert delivered(["a", "b"], is_streamed=False) == []
    assert rests == []
