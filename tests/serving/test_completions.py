"""Plain completions: every form of prompt, echo with log-probabilities, filling in."""

import pytest
import torch
from bundled_server import ASSETS
from openai.types import Completion
from transformers import AutoModelForCausalLM

from yggdrasil.serving.routes import completions

TEXT = "def add(a, b):\n    return"


def test_every_form_of_prompt_is_the_same_prompt(server, alone):
    tokens = server.post("/tokenize", prompt=TEXT)["tokens"]
    expected = alone.generate(TEXT, max_new_tokens=10)
    for prompt in (TEXT, [TEXT], tokens, [tokens]):
        reply = server.post("/v1/completions", prompt=prompt, max_tokens=10)
        Completion.model_validate(reply, strict=True)
        assert [choice["text"] for choice in reply["choices"]] == [expected.text]
    two = server.post("/v1/completions", prompt=[TEXT, "class A"], max_tokens=10)["choices"]

    assert [choice["index"] for choice in two] == [0, 1]
    assert two[1]["text"] == alone.generate("class A", max_new_tokens=10).text


def test_no_limit_may_be_said_by_minus_one(server):
    """As clients of other servers say it."""
    usual = server.post("/v1/completions", prompt=TEXT)["usage"]["completion_tokens"]
    endless = server.post("/v1/completions", prompt=TEXT, max_tokens=-1, ignore_eos=True)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 1.0, "seed": 3, "stop": ["e"]}

    assert usual <= 16 < endless["usage"]["completion_tokens"]
    assert endless["choices"][0]["finish_reason"] == "length"
    answers = [
        server.post("/v1/chat/completions", **chat, **given)["choices"][0]["message"]["content"]
        for given in ({}, {"top_k": -1}, {"max_tokens": -1}, {"max_completion_tokens": -1})
    ]
    assert answers == answers[:1] * 4
    for given in ({"top_k": -2}, {"max_tokens": -2}, {"max_tokens": -1.5}):
        assert next(iter(given)) in server.post("/v1/chat/completions", 400, **chat, **given)["error"]["message"]


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_an_echoed_prompt_has_the_log_probabilities_of_a_fresh_pass(server, alone, tokens):
    prompt = server.post("/tokenize", prompt=TEXT * 4)["tokens"]
    reply = server.post("/v1/completions", prompt=prompt, max_tokens=tokens, echo=True, logprobs=2, temperature=0)
    (choice,) = reply["choices"]
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32)
    with torch.no_grad():
        laws = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(laws[i, token]) for i, token in enumerate(prompt[1:])]
    logprobs = choice["logprobs"]

    assert choice["text"].startswith(TEXT * 4)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(prompt)] == pytest.approx(expected, abs=1e-3)
    assert len(logprobs["tokens"]) == len(prompt) + tokens == len(logprobs["text_offset"])
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["top_logprobs"][0] is None
    best = [max(top.values()) for top in logprobs["top_logprobs"][1 : len(prompt)]]
    assert best == pytest.approx(laws[:-1].amax(-1).tolist(), abs=1e-3)
    assert reply["usage"]["completion_tokens"] == tokens
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # scoring has just read them
    assert reply["timings"]["prompt_n"] == len(prompt)


def test_what_is_decoded_after_scoring_is_what_is_decoded_without(server, alone):
    plain = server.post("/v1/completions", prompt=TEXT, max_tokens=12)["choices"][0]["text"]
    echoed = server.stream("/v1/completions", prompt=TEXT, max_tokens=12, echo=True, logprobs=0)

    assert (
        "".join(chunk["choices"][0]["text"] for chunk in echoed)
        == server.post("/detokenize", tokens=server.post("/tokenize", prompt=TEXT)["tokens"])["content"] + plain
    )


@pytest.fixture
def with_begin(server, monkeypatch):
    """The server, whose tokenizer puts a token before every text, as Llama's do."""
    texts = server.uvicorn.config.app.state.service.texts
    encode = texts.encode

    def encoding(text, *, special=True):
        return [texts.tokenizer.eos_token_id] * special + encode(text, special=special)

    monkeypatch.setattr(texts, "encode", encoding)
    return server


@pytest.mark.parametrize("prompts", [TEXT, [TEXT, "class A"]])
def test_a_text_is_echoed_as_it_was_sent(with_begin, prompts):
    given = {"prompt": prompts, "max_tokens": 4, "n": 2, "echo": True, "logprobs": 0, "temperature": 1.0, "seed": 1}
    choices = with_begin.post("/v1/completions", **given)["choices"]
    chunks = with_begin.stream("/v1/completions", **given)
    parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]

    sent = [text for text in ([prompts] if isinstance(prompts, str) else prompts) for _ in range(2)]
    for text, choice in zip(sent, choices, strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert logprobs["tokens"][0] == "<|endoftext|>"
        assert logprobs["text_offset"][:2] == [0, 0]
        for name, place in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:]:
            assert choice["text"][place : place + len(name)] == name
        assert choice["text"] == "".join(part["text"] for part in parts if part["index"] == choice["index"])


def test_a_text_that_is_filled_in_is_echoed_without_marks(server, monkeypatch):
    monkeypatch.setattr(completions, "infill_marks", lambda _: (1, 2, 3))
    reply = server.post("/v1/completions", prompt=TEXT, suffix="end", max_tokens=4, echo=True)
    plain = server.post("/v1/completions", prompt=TEXT, suffix="end", max_tokens=4)

    assert reply["choices"][0]["text"] == TEXT + plain["choices"][0]["text"]


def test_a_text_that_is_filled_in_begins_as_every_text_does(with_begin, monkeypatch):
    """CodeLlama and DeepSeek Coder have learned to fill in behind the token that begins their texts."""
    monkeypatch.setattr(completions, "infill_marks", lambda _: (1, 2, 3))
    texts = with_begin.uvicorn.config.app.state.service.texts
    given = {"prompt": "a", "suffix": "b", "max_tokens": 1, "echo": True, "logprobs": 0}
    tokens = with_begin.post("/v1/completions", **given)["choices"][0]["logprobs"]["tokens"]

    assert tokens[:-1] == ["<|endoftext|>", texts.token_text(1), "a", texts.token_text(2), "b", texts.token_text(3)]


def test_a_suffix_needs_a_model_that_fills_in(server):
    error = server.post("/v1/completions", 400, prompt="a", suffix="b")["error"]

    assert error["param"] == "suffix"
