"""A training beside a decoder: what it learns from, that it ends with the decoder's process, and what it refuses."""

import json
import lzma
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from own_texts import RecordedLines
from tiny_pair import SHAPES, chat_tokenizer, make_pair, random_model

from yggdrasil.calibration.own_text import read_documents
from yggdrasil.cli import open_decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.training import beside, texts
from yggdrasil.training.settings import TrainSettings
from yggdrasil.training.training import train
from yggdrasil.tree.shape import PLAIN_STEP


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    tokenizer = chat_tokenizer()
    random_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def decoder_of(target, drafter=None, left_out=None, *, is_provisional=False):
    """What a training asks of a decoder: a plan that considered some drafters, and a file for its answers."""
    kept = []
    plan = SimpleNamespace(
        target=SimpleNamespace(path=lambda: target, source=target),
        drafter=drafter and SimpleNamespace(fingerprint=drafter),
        left_out=left_out and SimpleNamespace(drafter=SimpleNamespace(fingerprint=left_out)),
        is_provisional=is_provisional,
    )
    return SimpleNamespace(plan=plan, kept=kept, keep_answers=kept.append)


def test_requests_are_kept_as_documents(tmp_path):
    pair = make_pair()
    decoder = pair.decoder(FixedPolicy(PLAIN_STEP), SHAPES)
    decoder.generate([5, 6, 7], max_new_tokens=4)
    decoder.keep_answers(tmp_path / "answers.jsonl")
    found = [decoder.generate([5, 6, 8 + i], max_new_tokens=4).tokens for i in range(2)]

    documents = read_documents(tmp_path / "answers.jsonl")
    assert [document.prompt for document in documents] == [[5, 6, 8], [5, 6, 9]]
    assert [document.answer for document in documents] == found


@pytest.mark.parametrize("is_beside_use", [True, False])
def test_kept_answers_are_learned_and_beside_use_the_shipped_ones(target, tmp_path, monkeypatch, is_beside_use):
    (tmp_path / "answers.xz").write_bytes(lzma.compress(json.dumps(["a b c " * 300, "d e f"] * 9).encode()))
    monkeypatch.setattr(texts, "ANSWERS", tmp_path / "answers.xz")
    (tmp_path / "given.jsonl").write_text('{"prompt": "a", "answer": "b c d"}\n' * 3)
    settings = TrainSettings(
        target, tmp_path / "head", texts=(tmp_path / "given.jsonl",), minutes=0.0, threads=1,
        is_beside_use=is_beside_use,
    )  # fmt: skip
    settings.work.mkdir()
    lines = [json.dumps({"prompt": [5, 6 + i % 7, 8], "answer": [10, 11, 12]}) for i in range(40)]
    settings.answers.write_text("\n".join(lines) + "\n")
    train(settings, RecordedLines())

    card = (settings.out / "README.md").read_text()
    tokens = int(card.split("answers' tokens there are | ")[1].split(" |")[0])
    assert (tokens > 1000) == is_beside_use
    assert tokens > 90, "the kept answers, but for what is held out"


@pytest.mark.parametrize("loses_the_interrupt", [False, True])
def test_the_process_ends_with_the_pipe_to_it_and_says_so(target, tmp_path, monkeypatch, loses_the_interrupt):
    """It asks for the lowest priority, which is not given to it here: on a busy machine it would take minutes."""
    own = "import os\nos.nice = lambda by: print('nice', by, flush=True)\n"
    own += "os.kill = lambda *_: None\n" if loses_the_interrupt else ""
    (tmp_path / "sitecustomize.py").write_text(own)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(beside.__file__).parents[2])]))
    decoder = decoder_of(target)
    started = beside.start_training(decoder, tmp_path / "head")
    child = beside._CHILDREN.pop()
    child.stdin.close()  # as the end of this process does

    assert child.wait() == 0
    assert started.process == child.pid
    first, *_, last = started.log.read_text().splitlines()
    assert (first, last) == (f"nice {beside.NICENESS}", "interrupted; the next start goes on")
    assert decoder.kept == [tmp_path / "head.training" / "answers.jsonl"]


@pytest.fixture
def no_process(monkeypatch):
    monkeypatch.setattr(beside.subprocess, "Popen", lambda *_, **__: SimpleNamespace(pid=7))
    monkeypatch.setattr(beside, "_CHILDREN", [])


@pytest.mark.usefixtures("no_process")
def test_a_head_that_no_plan_has_measured_is_told(tmp_path, monkeypatch, capsys):
    out = tmp_path / "head"
    open_decoder.train_beside(decoder_of("my/model"), out)
    assert capsys.readouterr().err.count("\n") == 1, "there is no head yet"
    out.mkdir()
    (out / "README.md").write_text("A drafter for it")
    monkeypatch.setattr(beside, "model_fingerprint", lambda _: "f" * 16)
    open_decoder.train_beside(decoder_of("my/model", left_out="f" * 16), out)
    assert capsys.readouterr().err.count("\n") == 1, "it was measured and left out"
    open_decoder.train_beside(decoder_of("my/model"), out)
    said = capsys.readouterr().err.splitlines()

    assert "a head is trained in" in said[0]
    assert "(process 7, log " in said[0]
    assert "`yggdrasil calibrate my/model --quick --drafter" in said[1]
    open_decoder.train_beside(decoder_of("my/model", drafter="f" * 16, is_provisional=True), out)
    assert "drafts where it pays; the next start uses what it learns now" in capsys.readouterr().err.splitlines()[1]
    with pytest.raises(YggdrasilError, match="holds the head that the plan drafts with; train in another folder"):
        open_decoder.train_beside(decoder_of("my/model", drafter="f" * 16), out)


@pytest.mark.usefixtures("no_process")
def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(YggdrasilError, match="holds other files than a drafter"):
        beside.start_training(decoder_of("my/model"), tmp_path)
