"""What of a request reaches the model: answers that are gone on with, names for the template, prompts without end."""

import pytest

from yggdrasil.serving.tokenization import Texts

CHAT = [{"role": "user", "content": "Name a colour"}]
BEGUN = [*CHAT, {"role": "assistant", "content": "My favourite colour is"}]


def answer(server, messages, **given):
    return server.post("/v1/chat/completions", messages=messages, **{"max_tokens": 8, **given})


@pytest.mark.parametrize(
    "given", [{}, {"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}]
)
def test_an_answer_that_is_begun_is_gone_on_with(server, alone, given):
    rendered = alone.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    prompt = alone.tokenizer(rendered + BEGUN[1]["content"], add_special_tokens=False)["input_ids"]
    expected = alone.generate(prompt, max_new_tokens=8)
    reply = answer(server, BEGUN, **given)

    assert reply["choices"][0]["message"]["content"] == expected.text
    assert reply["usage"]["prompt_tokens"] == len(prompt)


def test_a_new_turn_follows_where_that_is_asked_for(server, alone):
    prompt = alone.encode_chat(BEGUN)
    for given in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert answer(server, BEGUN, **given)["usage"]["prompt_tokens"] == len(prompt)
    error = server.chat(continue_final_message=True, expect=400)["error"]
    assert error["param"] == "continue_final_message"


def test_names_for_the_template_reach_it(server, monkeypatch):
    tokenizer = server.worker.decoder.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ mood or 'no mood' }}: {{ messages[-1].content }}")
    usual = answer(server, CHAT)["usage"]["prompt_tokens"]
    longer = answer(server, CHAT, chat_template_kwargs={"mood": "in a good mood today"})["usage"]["prompt_tokens"]

    assert longer > usual
    for name in ("chat_template", "tools", "messages", "tokenize"):
        assert name in server.chat(chat_template_kwargs={name: "{{ 1 }}"}, expect=400)["error"]["message"]


def test_a_template_that_leaves_out_calls_is_told(server, monkeypatch):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*CHAT, {"role": "assistant", "content": "a", "tool_calls": [call]}, *CHAT]
    assert answer(server, messages)["warnings"] == []
    tokenizer = server.worker.decoder.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "earlier tool calls" in answer(server, messages)["warnings"][0]


def test_a_beginning_that_is_written_twice_is_told(server, monkeypatch):
    prompt = server.worker.decoder.encode("a b")
    monkeypatch.setattr(server.worker.decoder.tokenizer, "bos_token_id", prompt[0])
    (warning,) = server.post("/v1/completions", prompt=[prompt[0], *prompt], max_tokens=1)["warnings"]
    assert "begins with" in warning
    assert server.post("/v1/completions", prompt=prompt, max_tokens=1)["warnings"] == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_far_too_long_is_refused_by_its_beginning(server, monkeypatch, path):
    read = []
    encode = Texts.encode
    monkeypatch.setattr(Texts, "encode", lambda self, text, **how: read.append(len(text)) or encode(self, text, **how))
    text = "some words and " * 200_000
    error = server.post(path, 400, prompt=text, messages=[{"role": "user", "content": text}])["error"]

    assert error["code"] == "context_length_exceeded"
    assert "more than" in error["message"]
    assert sum(read) < 100_000


def test_a_long_prompt_of_one_holds_no_other(server):
    """Whoever renders a chat holds a lock: texts are tokenised without it, and chats that cannot fit never take it."""
    text = "some words and " * 200_000
    with server.uvicorn.config.app.state.service.texts._lock:
        assert server.post("/tokenize", content="a b")["count"] > 0
        server.post("/v1/completions", prompt="a b", max_tokens=1)
        server.post("/v1/chat/completions", 400, messages=[{"role": "user", "content": text}])
