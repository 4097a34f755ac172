"""Ollama's paths, for clients that speak no other: the same answers as a chat's, in its words."""

import json

import pytest

CHAT = [{"role": "user", "content": "Write a function"}]


def lines_of(server, path, **body):
    reply = server.client.post(path, json={"model": "tiny:latest", **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_chat_whole_and_in_lines(server, alone):
    expected = alone.chat(CHAT, max_new_tokens=16)
    options = {"num_predict": 16, "temperature": 0, "num_ctx": 4096}
    whole = server.post("/api/chat", model="tiny", messages=CHAT, stream=False, options=options)
    *parts, last = lines_of(server, "/api/chat", messages=CHAT, options=options)

    assert whole["message"] == {"role": "assistant", "content": expected.text}
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 16)
    assert whole["prompt_eval_count"] == expected.prompt_tokens
    assert "".join(part["message"]["content"] for part in parts) == expected.text
    assert not any(part["done"] for part in parts)
    assert last["done"]
    assert last["eval_count"] == 16


def test_a_body_needs_no_type_unless_a_page_sends_it(server):
    """``curl -d`` names a form's type, as Ollama's own examples do; a page's browser names its origin too."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": "tiny", "messages": CHAT, "stream": False, "options": {"num_predict": 4}})
    reply = server.client.post("/api/chat", content=body, headers=form)
    assert reply.json()["eval_count"] == 4
    refused = server.client.post("/api/chat", content=body, headers={**form, "origin": "https://elsewhere.example"})
    assert refused.status_code == 400
    assert "Content-Type: application/json" in refused.text


def test_a_prompt_is_a_users_turn(server, alone):
    turns = [{"role": "system", "content": "Be brief"}, *CHAT]
    body = {"prompt": CHAT[0]["content"], "system": "Be brief", "options": {"num_predict": 8}}
    *parts, last = lines_of(server, "/api/generate", **body)

    assert "".join(part["response"] for part in parts) == alone.chat(turns, max_new_tokens=8).text
    assert last["done"]


@pytest.mark.parametrize("wanted", [{"const": 7}, {"enum": [7]}])
def test_an_answer_of_a_schema(server, wanted):
    whole = server.post("/api/chat", model="tiny", messages=CHAT, stream=False, format=wanted)
    assert whole["message"]["content"] == "7"
    assert whole["done_reason"] == "stop"


def test_tools_go_both_ways(server):
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"const": "Oslo"}}}}
    earlier = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    messages = [*CHAT, earlier, {"role": "tool", "content": "cold", "tool_name": "weather"}]
    body = {"messages": messages, "tools": [{"type": "function", "function": function}], "options": {"num_predict": 8}}
    assert lines_of(server, "/api/chat", **body)[-1]["done"]


def test_the_model_is_listed(server):
    (card,) = server.client.get("/api/tags").json()["models"]
    assert card["name"] == "tiny"
    assert card["size"] > 0
    assert "version" in server.client.get("/api/version").json()
    (loaded,) = server.client.get("/api/ps").json()["models"]
    assert (loaded["name"], loaded["size"]) == ("tiny", card["size"])
    shown = server.post("/api/show", model="tiny")
    assert shown["template"]
    assert shown["capabilities"][0] == "completion"
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "llama.context_length": server.worker.decoder.assembly.engine.max_length,
    }


def test_a_request_without_a_text_loads_the_model(server):
    """As Ollama's clients do before the first question."""
    for path, given, said in (
        ("/api/generate", {}, {"response": ""}),
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
    ):
        reply = server.post(path, model="tiny", **given)
        assert said.items() <= reply.items()
        assert (reply["done"], reply["done_reason"]) == (True, "load")


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        ("/api/chat", {"model": "other", "messages": CHAT}, 404),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, 400),
        ("/api/chat", {"messages": CHAT, "options": {"temperature": "hot"}}, 400),
        ("/api/generate", {"prompt": "a", "raw": True}, 400),
        ("/api/embed", {"input": "a"}, 400),
        ("/api/embeddings", {"prompt": "a"}, 400),
        ("/api/show", {"model": "other"}, 404),
        ("/api/generate", {"model": "other"}, 404),
        ("/api/chat", {"model": "other", "messages": []}, 404),
        ("/api/pull", {}, 404),
    ],
)
def test_what_is_not_served_is_said(server, path, given, status):
    """An error is an object with the message, as clients of Ollama read it."""
    error = server.post(path, status, **{"model": "tiny", **given})["error"]
    assert isinstance(error, str)
    assert error
