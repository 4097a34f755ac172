"""Training on existing text: what files hold, and that the target generates none."""

import json

import pytest
from own_texts import RecordedLines
from tiny_pair import chat_tokenizer, random_model

from yggdrasil.calibration.own_text import ANSWER, OwnText
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import encode_chat
from yggdrasil.training.settings import CONTEXT, TrainSettings
from yggdrasil.training.state import KeptTraining
from yggdrasil.training.texts import read_texts
from yggdrasil.training.training import train

QUESTION, REPLY = {"role": "user", "content": "Name a colour"}, {"role": "assistant", "content": "Blue, like the sea."}


def lines(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def test_a_chat_is_its_rendered_prompt_and_its_answer(tmp_path):
    tokenizer = chat_tokenizer()
    file = lines(
        tmp_path / "chats.jsonl", [{"messages": [QUESTION, REPLY]}, {"prompt": "A colour is", "answer": " blue"}]
    )

    chat, plain = read_texts([file], tokenizer)

    assert chat.prompt == encode_chat(tokenizer, [QUESTION])
    assert tokenizer.decode(chat.answer) == REPLY["content"]
    assert plain.prompt == tokenizer.encode("A colour is")
    assert plain.answer == tokenizer.encode(" blue", add_special_tokens=False)


def test_plain_text_is_cut_into_documents_without_loss(tmp_path):
    tokenizer = chat_tokenizer()
    file = tmp_path / "book.txt"
    file.write_text("It was a dark and stormy night. " * 400, encoding="utf-8")

    documents = read_texts([file], tokenizer)

    assert [token for each in documents for token in (*each.prompt, *each.answer)] == tokenizer.encode(
        file.read_text(), add_special_tokens=False
    )
    assert len(documents) > 2
    assert {(len(each.prompt), len(each.answer)) for each in documents[:-1]} == {(CONTEXT, ANSWER)}
    assert all(each.prompt and each.answer for each in documents)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"prompt": "x", "answer": "y"}\n{"prompt": "x"}\n', "line 2: it has no strings prompt and answer"),
        ("a.jsonl", json.dumps({"messages": [REPLY, QUESTION]}), "do not end with an answer of the assistant"),
        ("a.jsonl", "no json\n", "line 1"),
        ("a.jsonl", "\n", "has no text"),
        ("a.txt", "", "has no text"),
        ("a.txt", b"\xff\xfe\xfa", "cannot be read"),
    ],
)
def test_a_file_without_usable_text_is_refused_by_name(tmp_path, name, content, said):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(YggdrasilError, match=said) as raised:
        read_texts([file], chat_tokenizer())
    assert str(file) in str(raised.value)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    tokenizer = chat_tokenizer()
    random_model(vocab_size=len(tokenizer), num_hidden_layers=6).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    records = [{"prompt": f"{number} and {number}?", "answer": f" That is {2 * number}."} for number in range(70)]
    texts = (lines(tmp_path / "sums.jsonl", records),)
    return TrainSettings(str(tmp_path / "target"), tmp_path / "head", texts=texts, minutes=0.0, threads=1)


def test_a_head_learns_existing_text_and_the_target_generates_none(settings, monkeypatch):
    def generate(*_):
        raise AssertionError("the target generates text")

    monkeypatch.setattr(OwnText, "write", generate)
    train(settings, RecordedLines())

    progress = KeptTraining.read(settings.work, Source.find(settings.target).fingerprint(), print).progress
    assert progress.steps == 1
    assert progress.tokens > 0
    assert "sums.jsonl" in (settings.out / "README.md").read_text()


@pytest.mark.parametrize("options", [{"tokens": 5}, {"prompts": True}])
def test_the_target_generates_beside_texts_where_it_is_asked_to(settings, tmp_path, options):
    prompts = (lines(tmp_path / "prompts.jsonl", [{"prompt": "x"}]),) if "prompts" in options else ()
    own = TrainSettings(settings.target, settings.out, "eagle3", prompts, settings.texts, tokens=options.get("tokens"))

    assert own.generates
    assert not settings.generates
    assert TrainSettings(settings.target, settings.out).generates
