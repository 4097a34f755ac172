"""Fields that clients of other servers send: they work here, or the reply names them."""

import pytest

CHAT = [{"role": "user", "content": "Write a function"}]


def answer(server, **given):
    return server.post("/v1/chat/completions", messages=CHAT, **{"max_tokens": 12, **given})


def text_of(reply):
    return reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"repeat_penalty": 9.0}, {"repetition_penalty": 9.0}),
        ({"n_predict": 5, "max_tokens": None}, {"max_tokens": 5}),
        ({"guided_regex": "a{3}"}, {"regex": "a{3}"}),
        ({"guided_choice": ["north", "south"]}, {"choice": ["north", "south"]}),
        ({"structured_outputs": {"regex": "b{2}"}}, {"regex": "b{2}"}),
        ({"structured_outputs": {"choice": ["left"]}}, {"regex": "left"}),
        ({"guided_json": {"const": 5}}, {"regex": "5"}),
        ({"guided_json": '{"const": 5}'}, {"regex": "5"}),
        ({"structured_outputs": {"json": {"const": 6}}}, {"regex": "6"}),
    ],
)
def test_their_name_does_what_ours_does(server, theirs, ours):
    reply = answer(server, **theirs)
    assert text_of(reply) == text_of(answer(server, **ours)) != text_of(answer(server))
    assert reply["warnings"] == []


def test_an_answer_ends_at_a_token_that_is_named(server, alone):
    tokens = alone.chat(CHAT, max_new_tokens=12).tokens
    end = tokens[5]
    reply = answer(server, stop_token_ids=[end])

    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == tokens.index(end) + 1
    assert text_of(reply) == alone.tokenizer.decode(tokens[: tokens.index(end)])


def test_a_least_length_is_kept(server):
    short = {"regex": "a{1,6}", "max_tokens": 12}
    assert answer(server, **short, min_tokens=4)["usage"]["completion_tokens"] >= 4


def test_two_names_for_one_field_must_agree(server):
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = {"messages": CHAT, "prompt": "a", "repeat_penalty": 1.5}
        server.post(path, **body, repetition_penalty=1.5, max_tokens=1)
        error = server.post(path, 400, **body, repetition_penalty=1.2)["error"]
        assert "repeat_penalty" in error["message"]
        assert "repetition_penalty" in error["message"]


def test_what_is_ignored_is_named(server):
    assert answer(server, user="me", metadata={"a": "b"}, mirostat=None)["warnings"] == []
    (warning,) = answer(server, mirostat=2)["warnings"]
    assert "mirostat" in warning
    last = server.stream("/v1/chat/completions", messages=CHAT, max_tokens=3, mirostat=2)[-1]
    assert last["warnings"] == [warning]
    last = server.stream("/v1/completions", prompt="a", max_tokens=3, xtc_probability=0.5)[-1]
    assert "xtc_probability" in last["warnings"][0]


def tool(name):
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "additionalProperties": False}},
    }


def allowed(mode, *names):
    chosen = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}


def test_a_choice_among_some_tools(server):
    given = {"tools": [tool("one"), tool("two")], "max_tokens": 200}
    reply = answer(server, **given, tool_choice=allowed("required", "two"))
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "two"
    server.chat(**given, tool_choice=allowed("auto", "one"))
    error = server.chat(**given, tool_choice=allowed("auto", "three"), expect=400)["error"]
    assert "three" in error["message"]
