"""Tools: the template's own format is found, calls are read back, and can be required."""

import json

import pytest
from bundled_server import TEMPLATE, open_pair

from yggdrasil.serving.tools import ToolFormat

LLAMA = TEMPLATE.replace("<tool_call>\n", "").replace("\n</tool_call>", "").replace('"arguments"', '"parameters"')
MISTRAL = TEMPLATE.replace("<tool_call>\n", "[CALLS] [").replace("\n</tool_call>", "]")
SCHEMA = {"$defs": {"unit": {"enum": ["C", "F"]}}, "type": "object", "required": ["unit"],
          "properties": {"unit": {"$ref": "#/$defs/unit"}}, "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def tokenizer():
    return open_pair().tokenizer


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TEMPLATE, 'Let me see. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
        (LLAMA, '{"name": "f", "parameters": {"x": 1}}'),
        (MISTRAL, '[CALLS] [{"name": "f", "arguments": {"x": 1}}]'),
    ],
)
def test_formats_are_found_and_calls_read(tokenizer, monkeypatch, template, text):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    found = ToolFormat.of(tokenizer)
    content, (call,) = found.parse(text)

    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 1})
    assert content == ("Let me see." if "see" in text else "")
    assert found.parse("no call at all").content == "no call at all"
    assert all(text.startswith(text[: found.decided(text[:end])]) for end in range(len(text)))
    assert found.decided(text) == text.find("<tool_call>") if "<tool" in text else found.decided(text) == 0


def test_templates_without_tools_have_no_format(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")

    assert ToolFormat.of(tokenizer) is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_is_one_with_arguments_of_its_schema(server, choice):
    given = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 80, "temperature": 1.0, "seed": 3}
    (whole,) = server.chat(**given)["choices"]
    (call,) = whole["message"]["tool_calls"]

    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    assert call["function"]["name"] in ("weather", "stop")
    if call["function"]["name"] == "weather":
        assert json.loads(call["function"]["arguments"])["unit"] in ("C", "F")
    chunks = server.stream("/v1/chat/completions", messages=[{"role": "user", "content": "Say something"}], **given)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"] == call["function"]
    assert not any(delta.get("content") for delta in deltas)


def test_answers_of_tools_go_back_into_the_template(server):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"unit": "C"}'}}
    turns = [
        {"role": "user", "content": "Warm?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "20", "tool_call_id": "1"},
    ]  # fmt: skip
    tokens = server.post("/tokenize", messages=turns)["tokens"]

    assert '{"name": "weather", "arguments": {"unit": "C"}}' in server.post("/detokenize", tokens=tokens)["content"]


def test_the_stream_shows_trees_where_asked_for(server):
    messages = [{"role": "user", "content": "Say something"}]
    chunks = server.stream("/v1/chat/completions", messages=messages, max_tokens=20, show_trees=True)
    trees = [tree for chunk in chunks for tree in chunk.get("trees", ())]

    assert len(trees) == chunks[-1]["timings"]["iterations"]
    assert sum(len(tree["accepted"]) - 1 for tree in trees) >= chunks[-1]["timings"]["draft_n_accepted"]
    for tree in trees:
        assert set(tree["accepted"]) <= set(tree["verified"]) <= set(range(len(tree["tokens"])))
        assert all(parent < max(node, 1) for node, parent in enumerate(tree["parents"]))
    assert any(len(tree["verified"]) > 1 for tree in trees)
