"""What is told of an answer while it grows: all of it, in order, at once when it begins and not too often later."""

from types import SimpleNamespace

import pytest

from yggdrasil.serving import teller as module
from yggdrasil.serving.jobs import Finished, Job, Piece
from yggdrasil.serving.teller import Teller

STEP = 0.008  # seconds an iteration takes


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(module, "monotonic", lambda: now.seconds)
    return now


def told(clock, texts, *, is_streamed=True, whole=None, logprobs=(), scored=()):
    """The events of an answer whose iterations gave ``texts``, and when each came."""
    events, times = [], []

    def emit(event):
        events.append(event)
        times.append(round(clock.seconds - 100, 3))

    teller = Teller(Job([1], {}, emit, is_streamed), scored)
    known = []
    request = SimpleNamespace(logprobs=lambda start: known[start:])
    for number, text in enumerate(texts):
        known += logprobs[number : number + 1]
        teller.note(text, request)
        clock.seconds += STEP
    result = SimpleNamespace(text="".join(texts) if whole is None else whole, logprobs=list(logprobs) or None)
    teller.end(result)
    assert isinstance(events[-1], Finished)
    return events[:-1], times


def test_the_first_text_is_told_at_once_and_later_ones_together(clock):
    pieces, times = told(clock, ["", "", "a", "b", "c", "d", "", "e", "f"])

    assert [piece.text for piece in pieces] == ["", "a", "bcd", "ef"]
    assert times[:3] == [STEP, 2 * STEP, 5 * STEP]
    assert all(isinstance(piece, Piece) for piece in pieces)


def test_a_prompt_that_is_read_at_once_is_told_with_its_first_text(clock):
    pieces, times = told(clock, ["", "a", "b"])

    assert [piece.text for piece in pieces] == ["a", "b"]
    assert times[0] == STEP


def test_what_is_scored_comes_first_and_each_log_probability_once(clock):
    pieces, _ = told(clock, ["a"] * 7, logprobs=[f"of {i}" for i in range(7)], scored=["scored"])

    assert [entry for piece in pieces for entry in piece.logprobs] == ["scored", *(f"of {i}" for i in range(7))]


def test_what_the_end_brings_to_light_is_told(clock):
    """Half a character that the last token left, or an answer that was cut."""
    pieces, _ = told(clock, ["a", "b"], whole="abc\ufffd")

    assert "".join(piece.text for piece in pieces) == "abc\ufffd"


def test_without_a_stream_only_the_whole_is_told(clock):
    pieces, times = told(clock, ["a", "b"], is_streamed=False)

    assert pieces == []
    assert len(times) == 1
