"""Prompt files: what is read, and what is refused with the file and the line."""

import json

import pytest

from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import Prompt, read_prompt_sets, read_prompts


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


def test_several_sets_follow_each_other(tmp_path):
    first = written(tmp_path, '{"id": "a", "prompt": "1"}', '{"id": "b", "prompt": "2"}').rename(tmp_path / "first")
    second = written(tmp_path, '{"id": "c", "prompt": "3"}', '{"id": "a", "prompt": "4"}')

    assert [prompt.prompt for prompt in read_prompt_sets([first, second], 1)] == ["1", "3"]
    with pytest.raises(YggdrasilError, match="two prompts have the id a; "):
        read_prompt_sets([first, second])
