"""Requests of llama.cpp's tests are sent to our server unchanged, but for its own completions and its model's name."""

import re
from types import SimpleNamespace

SERVER = SimpleNamespace(temperature=0.8, seed=42, n_predict=64, model_alias="tinyllama-2", server_port=0)


def answered(reply):
    """A ``make_request`` that records its requests."""
    requests = []

    def ask(server, method, path, data=None):
        requests.append((method, path, data))
        return SimpleNamespace(status_code=200, body=reply, headers={"content-type": "application/json"})

    return ask, requests


def test_their_completion_is_ours_under_another_name():
    from llama_server_tests import TIMES, _asked_of_ours

    reply = {"choices": [{"text": "two\nlines"}], "timings": dict.fromkeys(TIMES, 1.0)}
    ask, requests = answered(reply)

    found = _asked_of_ours(ask)(SERVER, "POST", "/completion", {"prompt": "a", "n_predict": 8})

    body = {"prompt": "a", "max_tokens": 8, "temperature": 0.8, "seed": 42}
    assert requests == [("POST", "/v1/completions", body)]
    assert found.body["content"] == "two\nlines"
    assert found.body["has_new_line"]


def test_an_answer_that_is_long_by_luck_goes_on(monkeypatch):
    from llama_server_tests import _body

    for name, goes_on in (("test_completion_parallel_slots[1-3]", True), ("test_completion[a]", False)):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"unit/test_completion.py::{name} (call)")
        assert ("ignore_eos" in _body(SERVER, {"prompt": "a"}, is_own=True)) is goes_on
        assert "ignore_eos" not in _body(SERVER, {"messages": []}, is_own=False)


def test_everything_else_is_sent_and_given_back_untouched():
    from llama_server_tests import _asked_of_ours

    ask, requests = answered({"object": "list"})
    body = {"messages": [1], "model": "x", "max_tokens": 3}

    found = _asked_of_ours(ask)(SERVER, "POST", "/chat/completions", body)

    assert requests == [("POST", "/chat/completions", {"messages": [1], "max_tokens": 3})]
    assert found.body == {"object": "list"}
    assert found.headers == {"Content-Type": "application/json"}


def test_words_are_compared_only_where_a_grammar_says_them():
    from llama_server_tests import CONSTRAINED

    assert all(CONSTRAINED.match(each) for each in ('"42"', '"foooooo"', "[ -3000 ]", "(\\{|John)+"))
    assert not any(CONSTRAINED.match(each) for each in ("(Suddenly)+", "But she couldn't", "^ blue"))


def test_what_is_left_out_has_a_reason():
    from llama_server_tests import LEFT_OUT, PARAMETERS

    assert all(name.startswith("test_") and reason for name, reason in LEFT_OUT.items())
    assert all(re.compile(pattern) and reason for pattern, reason in PARAMETERS.values())
