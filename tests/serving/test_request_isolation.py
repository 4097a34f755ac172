"""What goes wrong in one request stays in it: the next is answered as before, and the log has no word of either."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from yggdrasil.acceptance import grammar
from yggdrasil.errors import YggdrasilError
from yggdrasil.serving import tokenization
from yggdrasil.serving.server_settings import Limits

SECRET = "xylophone"
LONG = "a" * (Limits().grammar_bytes + 1)


@pytest.fixture(autouse=True)
def nothing_changes(server, caplog):
    """The same answer before and after, and a log that tells no text."""
    before = server.chat(max_tokens=12)["choices"]
    with caplog.at_level(logging.DEBUG):
        yield
    assert server.chat(max_tokens=12)["choices"] == before
    assert SECRET not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_no_numbers(server, stream):
    """A weight that is damaged for the time of one request."""
    norm = server.worker.decoder.assembly.target.loaded.tensors["model.norm.weight"]
    whole = norm.clone()
    try:
        norm.fill_(float("nan"))
        error = server.chat(SECRET, 500, max_tokens=8, stream=stream)["error"]
    finally:
        norm.copy_(whole)

    assert error["type"] == "server_error"
    assert "not finite" in error["message"]


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (MemoryError(), 500, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 500, "out of memory"),
        (RuntimeError(SECRET), 500, "RuntimeError"),
        (YggdrasilError("the constraint could not be followed: too complex"), 400, "too complex"),
    ],
)  # fmt: skip
def test_faults_in_the_middle_of_an_answer(server, monkeypatch, caplog, raised, status, said):
    target, calls = server.worker.decoder.assembly.engine.target, []
    verify = target.verify

    def fail_later(width):
        calls.append(width)
        if len(calls) == 2:
            raise raised
        return verify(width)

    with monkeypatch.context() as broken, caplog.at_level(logging.CRITICAL + 1):  # a traceback may say what was raised
        broken.setattr(target, "verify", fail_later)
        whole = server.chat("Count", status, max_tokens=60)["error"]
        calls.clear()
        messages = [{"role": "user", "content": "Count"}]
        *parts, last = server.stream("/v1/chat/completions", messages=messages, max_tokens=60)
        calls.clear()
        with server.client.stream("POST", "/v1/responses", json={"input": "Count", "stream": True}) as reply:
            frames = reply.read().decode().strip().split("\n\n")
        events = [json.loads(frame.partition("data: ")[2]) for frame in frames]

    assert parts, "it had begun"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "error"
    assert said in events[-1]["message"]
    for error in (whole, last["error"]):
        assert said in error["message"]
        assert SECRET not in error["message"]
        assert error["type"] == ("server_error" if status == 500 else "invalid_request_error")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", LONG),
        ("grammar", f"start: {LONG}"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"title": LONG}}}),
        ("grammar", 'start: "a'),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}),
    ],
    ids=["long regex", "long grammar", "long schema", "broken grammar", "broken schema"],
)  # fmt: skip
def test_constraints_that_are_too_large_or_broken(server, field, value):
    error = server.chat(SECRET, 400, max_tokens=4, **{field: value})["error"]

    assert error["type"] == "invalid_request_error"


def test_others_are_answered_while_a_constraint_is_tried(server, monkeypatch):
    begun, ends = Event(), Event()

    def never_ends(*_):
        begun.set()
        assert ends.wait(60)
        return False

    monkeypatch.setattr(grammar, "ends_within", never_ends)
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(server.chat, SECRET, 400, max_tokens=4, regex="slow to compile")
        assert begun.wait(60)
        assert server.chat(max_tokens=4)["choices"][0]["finish_reason"] == "length"
        assert not refused.done()
        ends.set()
        assert "the regex is too complex" in refused.result(60)["error"]["message"]


def test_an_answer_ends_at_its_time(server, monkeypatch):
    monkeypatch.setattr(server.worker, "_settings", type("", (), {"limits": Limits(answer_seconds=0.0)}))
    messages = [{"role": "user", "content": SECRET}]
    whole = server.chat(SECRET, max_tokens=400)["choices"][0]
    chunks = server.stream("/v1/chat/completions", messages=messages, max_tokens=400)

    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_an_error_is_told_whatever_was_sent(server):
    """Neither JSON nor text: the reply says so, and repeats nothing."""
    for content in (
        b"",
        b"{",
        b"\xff\xfe" + SECRET.encode(),
        b"[" * 100_000,
        b'{"messages": ' + b'"' + SECRET.encode() * 9,
    ):
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            reply = server.client.post(path, content=content, headers={"Content-Type": "application/json"})
            assert reply.status_code == 400
            assert SECRET not in reply.json()["error"]["message"]


def test_filling_in_writes_the_models_own_marks(server, monkeypatch):
    """Three letters of the bundled vocabulary stand for a family's marks."""
    monkeypatch.setattr(tokenization, "_MARKS", (("A", "B", "C"),))
    reply = server.post("/v1/completions", prompt="def f(", suffix="return x", max_tokens=4)
    vocabulary = server.worker.decoder.tokenizer.get_vocab()
    before, after = (server.post("/tokenize", prompt=text)["tokens"] for text in ("def f(", "return x"))
    prompt = [vocabulary["A"], *before, vocabulary["B"], *after, vocabulary["C"]]

    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["choices"] == server.post("/v1/completions", prompt=prompt, max_tokens=4)["choices"]
