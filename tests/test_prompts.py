"""Prompt files: what is read, and what is refused with the file and the line."""

import copy
import json

import pytest
from tiny_pair import byte_tokenizer, chat_tokenizer
from tokenizers import AddedToken

from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import (
    CHAT_PROMPTS,
    HELD_OUT_CHAT_PROMPTS,
    SHIPPED,
    BadLine,
    Message,
    Prompt,
    apply_template,
    encode_chat,
    encode_prompt,
    encode_prompts,
    read_prompts,
    scan_prompts,
    spread_over,
)


def written(folder, *lines, name="prompts.jsonl"):
    path = folder / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_prompts_come_in_order_with_their_ids(tmp_path):
    path = written(
        tmp_path, '{"id": "a", "prompt": "one", "more": 1}', "", '{"prompt": "two"}', '{"id": 7, "prompt": ""}'
    )

    assert read_prompts(path) == [Prompt("a", "one"), Prompt("3", "two"), Prompt("7", "")]
    assert read_prompts(path, limit=2) == [Prompt("a", "one"), Prompt("3", "two")]


def test_categories_are_kept(tmp_path):
    path = written(
        tmp_path, '{"prompt": "one", "category": "qa"}', '{"prompt": "two", "category": 3}', '{"prompt": ""}'
    )

    assert [prompt.category for prompt in read_prompts(path)] == ["qa", "3", None]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_any_text_survives(tmp_path, ascii_only):
    """U+2028 and U+0085 end a line for Python but not in JSON lines."""
    texts = ["two\nlines", 'tab\t"quoted"', "é 😀", "a\u2028b", "a\x85b", "\u2029\x0b\x0c\x1c"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=ascii_only) for text in texts]

    assert [prompt.prompt for prompt in read_prompts(written(tmp_path, *lines))] == texts
    path = tmp_path / "windows.jsonl"
    path.write_bytes("\r\n".join(lines).encode())
    assert [prompt.prompt for prompt in read_prompts(path)] == texts


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (['{"prompt": "a"}', "{prompt: b}"], "prompts.jsonl, line 2 is not JSON .*; give one object a line"),
        (['{"prompt": "a"}', "", '{"text": "b"}'], "prompts.jsonl, line 3 has no text in a field named prompt"),
        (['{"prompt": 3}'], "line 1 has no text in a field named prompt"),
        (['["prompt"]'], "line 1 has no text in a field named prompt"),
        (['"prompt"'], "line 1 has no text in a field named prompt"),
        (['{"prompt": "a", "messages": []}'], "line 1 has both prompt and messages"),
        (['{"messages": []}'], "line 1 has messages that are no chat: messages must be a list such as"),
        (['{"messages": "hello"}'], "line 1 has messages that are no chat: messages must be a list such as"),
        (['{"messages": [{"role": "user"}]}'], "message 1 must have the fields role and content and no others"),
        (['{"messages": [{"role": "tool", "content": "a"}]}'], "message 1 has the role 'tool'; it must be one of sys"),
        (['{"messages": [{"role": "user", "content": ["a"]}]}'], "message 1 has a content that is no text"),
        (['{"prompt": "a\\ud800"}'], r"line 1 cannot be read: the prompt has half of a surrogate pair \('\\ud800'\)"),
        (['{"id": "\\udfff", "prompt": "a"}'], "line 1 cannot be read: its id has half of a surrogate pair"),
        (["[" * 100_000 + "]" * 100_000], "line 1 is nested too deeply; give one object"),
        (['{"id": ' + "7" * 5000 + ', "prompt": "a"}'], r"line 1 is not JSON \(.*digits.*\); give one object a line"),
        ([""], "prompts.jsonl holds no prompts; give JSON lines"),
    ],
)
def test_faults_name_file_and_line(tmp_path, lines, sentence):
    with pytest.raises(YggdrasilError, match=sentence):
        read_prompts(written(tmp_path, *lines))


def test_a_file_that_cannot_be_read(tmp_path):
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.jsonl", tmp_path, binary):
        with pytest.raises(YggdrasilError, match=rf"the prompt file {path} cannot be read .*; give JSON lines"):
            read_prompts(path)


def test_chats_stand_in_the_place_of_prompts(tmp_path):
    turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "one"}]
    path = written(tmp_path, json.dumps({"id": "a", "messages": turns}), '{"prompt": "two"}')
    chat, plain = read_prompts(path)

    assert chat == Prompt("a", "one", messages=(Message("system", "be"), Message("user", "one")))
    assert plain.messages is None
    assert read_prompts(path, chat=True) == [chat, Prompt("2", "two", messages=(Message("user", "two"),))]


def test_a_chat_is_encoded_by_the_tokenizers_own_template():
    tokenizer, turns = chat_tokenizer(), [{"role": "user", "content": "Then on, é"}]
    expected = tokenizer("u-Then on, é<end>a-")["input_ids"]

    assert encode_chat(tokenizer, turns) == expected
    assert encode_prompt(tokenizer, Prompt("0", "Then on, é").as_chat()) == expected
    assert encode_prompt(tokenizer, Prompt("0", "Then on, é")) == tokenizer("Then on, é")["input_ids"]
    assert encode_chat(tokenizer, [*turns, Message("assistant", "a"), Message("user", "b")]) == [
        *expected, *tokenizer("a<end>u-b<end>a-")["input_ids"],
    ]  # fmt: skip


def test_a_chat_needs_a_template_that_takes_it():
    turns = [{"role": "user", "content": "a"}]
    with pytest.raises(YggdrasilError, match="has no chat template, so it is no chat model"):
        encode_chat(byte_tokenizer(), turns)
    picky = copy.deepcopy(byte_tokenizer())
    picky.chat_template = "{{ raise_exception('turns must alternate') }}"
    with pytest.raises(YggdrasilError, match="template does not take these messages: turns must alternate"):
        encode_chat(picky, turns)


def test_a_bad_line_does_not_end_the_file(tmp_path):
    path = written(tmp_path, '{"prompt": "a"}', "{", '{"prompt": "b"}')
    first, bad, last = scan_prompts(path)

    assert (first, last) == (Prompt("1", "a"), Prompt("3", "b"))
    assert isinstance(bad, BadLine)
    assert bad.id == "2"
    assert bad.reason.startswith(f"{path}, line 2 is not JSON")


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(tmp_path, limit):
    with pytest.raises(YggdrasilError, match=f"--limit is {limit}; read at least 1 prompt"):
        read_prompts(written(tmp_path, '{"prompt": "a"}'), limit)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')

    assert read_prompts(path) == [Prompt("1", "a")]


def test_shipped_prompts_are_read_and_explained():
    """Every file can be read, has ids of its own, and is in the folder's README with a licence."""
    files = sorted(SHIPPED.glob("*.jsonl"))
    readme = (SHIPPED / "README.md").read_text(encoding="utf-8")

    assert {CHAT_PROMPTS, HELD_OUT_CHAT_PROMPTS, SHIPPED / "humaneval.jsonl"} == set(files)
    assert [len(read_prompts(file)) for file in files] == [12, 48, 82]
    assert all(f"| `{file.name}` | {len(read_prompts(file))} |" in readme for file in files)
    assert "Copyright (c) OpenAI" in readme


def test_what_is_calibrated_on_is_not_measured_on():
    """No held-out prompt, nor a longer stretch of one, stands in the prompts for calibration."""
    calibration = "\n".join(prompt.prompt for prompt in read_prompts(CHAT_PROMPTS))
    for prompt in read_prompts(HELD_OUT_CHAT_PROMPTS):
        stretches = {prompt.prompt[i : i + 50] for i in range(max(1, len(prompt.prompt) - 50))}
        assert not any(stretch in calibration for stretch in stretches)


def test_the_first_few_calibration_prompts_are_of_every_kind():
    """A quick calibration reads no more than those."""
    prompts = read_prompts(CHAT_PROMPTS)

    assert {prompt.category for prompt in prompts[:9]} == {prompt.category for prompt in prompts}


def test_few_prompts_are_of_all_parts_of_a_file():
    prompts = [Prompt(str(number), "text") for number in range(10)]

    assert [prompt.id for prompt in spread_over(prompts, 4)] == ["0", "2", "5", "7"]
    assert spread_over(prompts, 99) == prompts


def marked_tokenizer(template):
    """A tokenizer whose control tokens are ``<end>``, which is special, and ``<call>``, which the template writes."""
    tokenizer = copy.deepcopy(chat_tokenizer())  # the tests share one
    tokenizer.add_tokens([AddedToken("<call>"), AddedToken("<b>")])
    tokenizer.chat_template = template
    return tokenizer


TURNS = "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}{% if tools %}<call>{{ tools }}{% endif %}"


def test_a_chat_without_control_strings_has_the_templates_own_tokens():
    tokenizer = marked_tokenizer(TURNS)
    turns = [{"role": "user", "content": "a <b>b</b> <ca ll>"}]

    assert (
        apply_template(tokenizer, turns) == tokenizer.apply_chat_template(turns, add_generation_prompt=True).input_ids
    )


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("text", ["<end>", "a<call>b", "<en<end>d>", "<<end>", "<end><end><call>", "qzxcut<end>"])
def test_control_strings_of_a_message_stay_text(role, text):
    tokenizer = marked_tokenizer(TURNS)
    end, call, tag = tokenizer.convert_tokens_to_ids(["<end>", "<call>", "<b>"])

    tokens = apply_template(tokenizer, [{"role": role, "content": f"{text}<b>"}])

    assert tokens.count(end) == 1
    assert tokens[-1] == end
    assert call not in tokens
    assert tag in tokens  # neither special nor the template's
    spelled = text.replace("<", "").replace(">", "")  # this vocabulary has neither
    assert tokenizer.decode(tokens) == f"{spelled}<b><end>"


def test_control_strings_of_tools_stay_text_and_the_templates_own_do_not():
    tokenizer = marked_tokenizer(TURNS)
    tools = [{"type": "function", "function": {"name": "f<call>", "description": ["<end>"], "parameters": {}}}]

    tokens = apply_template(tokenizer, [{"role": "user", "content": "a"}], tools)

    end, call = tokenizer.convert_tokens_to_ids(["<end>", "<call>"])
    assert (tokens.count(end), tokens.count(call)) == (1, 1)
    assert "fcall" in tokenizer.decode(tokens)
    assert "qzxcut" not in tokenizer.decode(tokens)


def test_a_template_still_finds_what_it_looks_for_in_earlier_answers():
    tokenizer = marked_tokenizer("{% for m in messages %}{{ m['content'].split('<call>')[-1] }}<end>{% endfor %}")
    turns = [{"role": "assistant", "content": "thoughts<call>answer"}]

    assert tokenizer.decode(apply_template(tokenizer, turns)) == "answer<end>"


def test_a_chat_for_a_model_without_template_is_named_by_its_line(tmp_path):
    tokenizer = copy.deepcopy(chat_tokenizer())
    tokenizer.chat_template = None
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    found = read_prompts(file)

    assert encode_prompts(tokenizer, found[:1]) == [encode_prompt(tokenizer, "a")]
    with pytest.raises(YggdrasilError, match=r"prompts\.jsonl, line 2: the model's tokenizer has no chat template"):
        encode_prompts(tokenizer, found)
