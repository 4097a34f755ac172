"""Tools: the template's own format is found, calls are read back, and can be required."""

import copy
import json
import re
from itertools import pairwise

import pytest
from bundled_server import TEMPLATE, open_pair
from tokenizers import AddedToken

from yggdrasil.acceptance.grammar import GrammarCompiler
from yggdrasil.serving.request_fields import ChatMessage, Tool
from yggdrasil.serving.tokenization import turns_of
from yggdrasil.serving.tools import ToolFormat

LLAMA = TEMPLATE.replace("<tool_call>\n", "").replace("\n</tool_call>", "").replace('"arguments"', '"parameters"')
# As Mistral's: ids of calls have nine letters.
MISTRAL = TEMPLATE.replace(
    "<tool_call>\n", "{% if call.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[CALLS] ["
).replace("\n</tool_call>", "]")
# As Qwen3's: the last answer has an empty thinking block, whether it is a call or not.
THINKING = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}",
)
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
    content, (call,) = found.parse(text, {"f"})

    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 1})
    assert content == ("Let me see." if "see" in text else "")
    assert found.parse("no call at all", {"f"}).content == "no call at all"
    assert all(text.startswith(found.decided(text[:end])) for end in range(len(text)))
    assert found.decided(text) == ("Let me see. " if "see" in text else "")


@pytest.mark.parametrize(
    ("before", "content"),
    [
        ("", ""), ("<think>\n\n</think>\n\n", ""), ("<think>\nOkay.\n</think>\n\n", "<think>\nOkay.\n</think>"),
        ("Let me see. ", "Let me see."),
    ],
)  # fmt: skip
def test_a_call_is_read_whatever_the_model_thought_before(tokenizer, monkeypatch, before, content):
    """An empty thinking block of the template's own is neither part of the mark nor worth telling."""
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    found = ToolFormat.of(tokenizer)
    text = before + '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    parsed = found.parse(text, {"f"})

    assert [json.loads(call.function.arguments) for call in parsed.calls] == [{"x": 1}]
    assert parsed.content == content
    assert all(content.startswith(found.decided(text[:end]).rstrip()) for end in range(len(text)))
    assert found.decided("No call at all.") == "No call at all."


def test_a_call_that_must_be_has_the_templates_empty_thinking_block(tokenizer, monkeypatch):
    """A model that is not to think writes it, so what follows is what it would have called."""
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    constraint = ToolFormat.of(tokenizer).constraint([Tool(**TOOLS[1])])
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    text = '<think>\n\n</think>\n\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    assert compiler.compile(constraint).allows(tokens)
    assert ToolFormat.of(tokenizer).parse(text, {"stop"}).content == ""


def test_ids_of_calls_are_what_every_template_takes(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", MISTRAL)
    text = '[CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 1}}]'
    calls = ToolFormat.of(tokenizer).parse(text, {"f"}).calls
    turns = turns_of([ChatMessage(role="assistant", tool_calls=[call.model_dump() for call in calls])])

    assert text.removesuffix("]").partition("}}, ")[0] in tokenizer.apply_chat_template(turns, tokenize=False)
    assert all(re.fullmatch("[0-9a-zA-Z]{9}", call.id) for call in calls)
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ava", "age": 3}', '{"name": "f"}', '{"name": "g", "parameters": {}}',
        '{"name": 1, "parameters": {}}', '["f"]', "{", "", "[]",
        '[{"name": "f", "parameters": {}}, {"name": "Ava"}]', '{"name": "f", "parameters": {}} and more',
    ],
)  # fmt: skip
def test_an_object_that_nothing_marks_is_a_call_only_of_a_tool_with_arguments(tokenizer, monkeypatch, text):
    """A text that holds more than calls is text, whole."""
    monkeypatch.setattr(tokenizer, "chat_template", LLAMA)

    assert ToolFormat.of(tokenizer).parse(text, {"f"}) == (text, [])


@pytest.mark.parametrize(
    ("written", "told"),
    [(json.dumps('{"x": 1}'), '{"x": 1}'), ('""', "{}"), ("null", "{}"), ('{"x": ""}', '{"x": ""}')],
)
def test_arguments_are_an_object_whatever_a_model_makes_of_them(tokenizer, written, told):
    """Granite writes them as a text, as OpenAI's clients have them, and some models nothing where there are none."""
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    (call,) = ToolFormat.of(tokenizer).parse(text, {"f"}).calls
    (turn,) = turns_of([ChatMessage(role="assistant", tool_calls=[call.model_dump()])])

    assert call.function.arguments == told
    assert turn["tool_calls"][0]["function"]["arguments"] == json.loads(told)


def test_a_call_with_line_breaks_in_its_texts_is_one(tokenizer):
    """As models write code; JSON has them escaped."""
    text = '<tool_call>\n{"name": "f", "arguments": {"code": "a = 1\n\tb"}}\n</tool_call>'
    (call,) = ToolFormat.of(tokenizer).parse(text, {"f"}).calls

    assert json.loads(call.function.arguments) == {"code": "a = 1\n\tb"}


def test_text_up_to_the_first_call_is_text(tokenizer):
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    found = ToolFormat.of(tokenizer).parse(f"The tag <tool_call> marks calls. {call}", {"f"})

    assert found.content == "The tag <tool_call> marks calls."
    assert len(found.calls) == 1


def test_a_mark_in_an_argument_is_part_of_it(tokenizer):
    arguments = [{"a": "say <tool_call> now"}, {}, {"b": "</tool_call>"}]
    calls = [json.dumps({"name": "f", "arguments": each}) for each in arguments]
    text = "".join(f"<tool_call>\n{call}\n</tool_call>\n" for call in [*calls[:2], "no call", calls[2]])
    found = ToolFormat.of(tokenizer).parse(f"Now. {text}", {"f"})

    assert found.content == "Now."
    assert [json.loads(call.function.arguments) for call in found.calls] == arguments


# Parameters, arguments that fit them, and some that do not.
PLACES = {
    "an argument called as a keyword": (
        {"properties": {"definitions": {"const": "x"}}, "required": ["definitions"]}, {"definitions": "x"}, {},
    ),
    "the whole": (
        {"properties": {"a": {"anyOf": [{"$ref": "#"}, {"const": "x"}]}}, "required": ["a"]},
        {"a": {"a": "x"}}, {"a": {"name": "look", "arguments": {"a": "x"}}},
    ),
    "a place": (
        {"properties": {"b": {"const": "x"}, "c": {"$ref": "#/properties/b"}}, "required": ["b", "c"]},
        {"b": "x", "c": "x"}, {"b": "x", "c": "y"},
    ),
    "definitions": (
        {"definitions": {"d": {"const": "x"}}, "properties": {"e": {"$ref": "#/definitions/d"}}, "required": ["e"]},
        {"e": "x"}, {"e": "y"},
    ),
    "an anchor": (
        {"properties": {"g": {"$ref": "#A"}}, "$defs": {"d": {"$anchor": "A", "const": "x"}}, "required": ["g"]},
        {"g": "x"}, {"g": "y"},
    ),
    "a name of its own": (
        {"$id": "https://a.example/b", "properties": {"h": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"const": "x"}},
         "required": ["h"]}, {"h": "x"}, {"h": "y"},
    ),
    "a value": (
        {"properties": {"f": {"const": {"$ref": "#/there"}}}, "required": ["f"]},
        {"f": {"$ref": "#/there"}}, {"f": {"$ref": "urn:tool:1#/there"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_arguments_are_what_the_schema_says_wherever_its_references_point(tokenizer, name):
    parameters, fitting, other = PLACES[name]
    parameters = {"type": "object", "additionalProperties": False, **parameters}
    tools = [Tool(**TOOLS[1]), Tool(type="function", function={"name": "look", "parameters": parameters})]
    constraint = ToolFormat.of(tokenizer).constraint(tools)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

    for arguments, is_allowed in ((fitting, True), (other, False)):
        text = f'<tool_call>\n{{"name": "look", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        assert compiler.compile(constraint).allows(tokens) == is_allowed


def test_parameters_that_are_no_schema_are_told_by_that_name(server):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "nothing"}}}]
    reply = server.chat(expect=400, tools=tools, tool_choice="required")

    assert "the schema of the tools is not valid" in reply["error"]["message"]


def test_what_follows_a_response_format_is_no_call(server, monkeypatch):
    """Where nothing marks a call, an object that was asked for may look like one."""
    tokenizer, service = server.worker.decoder.tokenizer, server.uvicorn.config.app.state.service
    monkeypatch.setattr(tokenizer, "chat_template", LLAMA)
    monkeypatch.setitem(vars(service), "tool_format", ToolFormat.of(tokenizer))
    call = {"type": "object", "properties": {"name": {"const": "stop"}, "parameters": {"const": {}}},
            "required": ["name", "parameters"], "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": call}}
    (whole,) = server.chat(tools=TOOLS, response_format=wanted, max_tokens=60)["choices"]

    assert json.loads(whole["message"]["content"]) == {"name": "stop", "parameters": {}}
    assert whole["message"]["tool_calls"] is None
    assert whole["finish_reason"] == "stop"


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


def test_a_stream_tells_all_that_stands_before_a_call(server):
    """A mark in the text holds it back until it is known to be none."""
    said = 'The tag <tool_call> marks calls. <tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    given = {"tools": TOOLS, "regex": re.escape(said), "max_tokens": 120}
    (whole,) = server.chat(**given)["choices"]
    chunks = server.stream("/v1/chat/completions", messages=[{"role": "user", "content": "Say something"}], **given)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]

    assert whole["message"]["content"] == "The tag <tool_call> marks calls."
    assert "".join(delta.get("content") or "" for delta in deltas).rstrip() == whole["message"]["content"]
    assert deltas[-1]["tool_calls"][0]["function"] == whole["message"]["tool_calls"][0]["function"]


@pytest.mark.parametrize("before", ["Let me look. ", ""])
def test_a_call_that_special_tokens_alone_mark_is_found_behind_text(server, monkeypatch, before):
    """As Mistral's and Command-R's: the mark shows in no text, and an answer that is not all JSON was text."""
    server.chat(regex="a", max_tokens=4)  # constraints go by the tokenizer of the first: "~" is text there
    tokenizer = copy.deepcopy(server.worker.decoder.tokenizer.whole)
    tokenizer.add_special_tokens({"additional_special_tokens": ["~", "^"]})
    tokenizer.chat_template = TEMPLATE.replace("<tool_call>\n", "~").replace("\n</tool_call>", "^")
    monkeypatch.setattr(server.worker.decoder, "tokenizer", tokenizer)
    monkeypatch.setitem(vars(server.uvicorn.config.app.state.service), "tool_format", ToolFormat.of(tokenizer))
    call = '~{"name": "stop", "arguments": {"text": "{}"}}^'
    given = {"tools": TOOLS, "regex": re.escape(before + call + call), "max_tokens": 120}
    (whole,) = server.chat(**given)["choices"]
    chunks = server.stream("/v1/chat/completions", messages=[{"role": "user", "content": "Say something"}], **given)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]

    assert [each["function"]["arguments"] for each in whole["message"]["tool_calls"]] == ['{"text": "{}"}'] * 2
    assert (whole["message"]["content"] or "") == before.rstrip()
    assert "".join(delta.get("content") or "" for delta in deltas).rstrip() == before.rstrip()
    assert len(deltas[-1]["tool_calls"]) == 2
    (text,) = server.chat(tools=TOOLS, regex=re.escape("No ^call~ at all."), max_tokens=60)["choices"]
    assert (text["message"]["content"], text["message"]["tool_calls"]) == ("No call at all.", None)


@pytest.mark.parametrize(("sent", "shown"), [('{"unit": "C"}', '{"unit": "C"}'), ("", "{}")])
def test_answers_of_tools_go_back_into_the_template(server, sent, shown):
    """Arguments as objects; clients that gather a call from a stream have an empty text where it has none."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": sent}}
    turns = [
        {"role": "user", "content": "Warm?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "20", "tool_call_id": "1"},
    ]  # fmt: skip
    tokens = server.post("/tokenize", messages=turns)["tokens"]

    assert f'{{"name": "weather", "arguments": {shown}}}' in server.post("/detokenize", tokens=tokens)["content"]


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


FENCED = '```json\n{"name": "weather", "arguments": {"unit": "C"}}\n```'


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (FENCED, 1),
        ('{"name": "weather", "arguments": {}}', 1),
        (f"{FENCED}\n{FENCED}", 2),
        ('```\n[{"name": "weather", "arguments": {}}, {"name": "stop", "arguments": {}}]\n```', 2),
        (FENCED.replace("weather", "other"), 0),
        (f"{FENCED}\nThis calls the tool.", 0),
        ("```python\nprint(1)\n```", 0),
        ('{"name": "weather"}', 0),
    ],
)
def test_an_answer_that_is_nothing_but_calls_needs_no_mark(tokenizer, text, count):
    """As Qwen2.5-Coder writes them. In a stream nothing of a call is told as text."""
    found = ToolFormat.of(tokenizer)

    content, calls = found.parse(text, {"weather", "stop"})

    assert len(calls) == count
    assert content == ("" if count else text)
    told = [found.decided(text[:end]) for end in range(len(text) + 1)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(told))
    if count:
        assert set(told) == {""}
    if text.startswith("```python"):
        assert told[5] == text[:5]


def test_a_mark_that_is_no_special_token_is_required_by_its_id(tokenizer):
    """Qwen's ``<tool_call>`` is an added token, and not special: its text alone is made of other tokens."""
    template, tokenizer = tokenizer.chat_template, copy.deepcopy(tokenizer.whole)
    tokenizer.chat_template = template
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    begin, end = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    tools = [Tool.model_validate(each) for each in TOOLS]
    constraint = ToolFormat.of(tokenizer).constraint(tools)

    grammar = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).compile(constraint)

    assert grammar.mask([], len(tokenizer)).nonzero().flatten().tolist() == [begin]
    call = '\n{"name": "weather", "arguments": {"unit": "C"}}\n'
    written = tokenizer(call, add_special_tokens=False)["input_ids"]
    assert grammar.allows([begin, *written, end, tokenizer.eos_token_id])
