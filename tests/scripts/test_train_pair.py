"""A pair is trained at a size of seconds: from texts to two models that transformers opens, and on from there."""

import errno
import importlib
import json
import re
import sys
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import typer
from transformers import AutoTokenizer, LlamaForCausalLM
from typer.testing import CliRunner

from yggdrasil.errors import Interrupted, YggdrasilError

TINY = {
    "vocab_size": 300, "target_hidden": 16, "target_layers": 2, "target_intermediate": 24, "drafter_hidden": 8,
    "drafter_layers": 1, "drafter_intermediate": 16, "head_dim": 8, "max_positions": 64, "sequence_length": 16,
    "long_sequence_length": 32, "tokens_per_step": 64,
}  # fmt: skip


@pytest.fixture
def script(monkeypatch):
    """Not compiled, and a minute of training is a second."""
    script = importlib.import_module("train_pair")
    monkeypatch.setattr(script, "Recipe", partial(script.Recipe, **TINY))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    ticks = count()  # drawn by the script alone: other threads of the process read the true clock
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    return script


@pytest.fixture
def texts(script, tmp_path):
    """Folders of both kinds, with texts that are held out and such as are not."""
    pair_text = sys.modules["pair_text"]
    for kind, name in (("code", "{}.py"), ("prose", "{}.txt")):
        (tmp_path / kind).mkdir()
        written = set()
        for number in count():
            text = f"{kind} number {number}: " + "one thing after another, and again. " * 8
            is_new = pair_text.is_held_out(text) not in written
            if number < 4 or is_new:
                (tmp_path / kind / name.format(number)).write_text(text)
                written.add(pair_text.is_held_out(text))
            if number >= 4 and len(written) == 2:
                break
    return tmp_path


def run(script, folder, *options):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(script.main)
    given = [part for name in ("code", "prose", "work", "out") for part in (f"--{name}", str(folder / name))]
    return CliRunner().invoke(app, [*given, *options])


def train(script, folder, minutes, *options):
    ended = run(script, folder, "--joint-minutes", str(minutes), *options)
    assert ended.exit_code == 0, ended.exception
    return torch.load(folder / "work" / "joint.pt", weights_only=True)


def test_a_pair_learns_and_goes_on_learning(script, texts, tmp_path):
    first = train(script, texts, 0.5)
    untrained = script.build_pair(script.Recipe(), None)[0].state_dict()
    assert first["step"] == 29, "the clock is read between steps"
    assert first["seen"] == 29 * 64
    assert all((first["target"][name] != untrained[name]).any() for name in untrained)
    before = json.loads((tmp_path / "out" / "recipe.json").read_text())
    again = train(script, texts, 1.0)

    assert again["step"] == 58, "it went on where it was"
    assert before == {**json.loads((tmp_path / "out" / "recipe.json").read_text()), "joint_minutes": 0.5}
    same = train(script, texts, 1.0)
    assert same["step"] == 58, "its time was up"
    assert all(torch.equal(value, same["target"][name]) for name, value in again["target"].items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "target")
    assert tokenizer.decode(tokenizer("again, and one thing")["input_ids"]) == "again, and one thing"
    for name in ("target", "drafter"):
        model = LlamaForCausalLM.from_pretrained(tmp_path / "out" / name, dtype=torch.float32)
        kept = {key: value.bfloat16().float() for key, value in again[name].items()}
        assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    may_read = {name: mode & 0o777 for name, (_, mode) in files_of(tmp_path / "out").items()}
    assert len(set(may_read.values())) == 1, may_read
    card = (tmp_path / "out" / "README.md").read_text()
    assert "nan" not in card
    assert "| English prose |" in card


@pytest.mark.slow
def test_it_learns_what_the_text_says(script, texts):
    """Which repeats itself: every next byte could be known."""
    train(script, texts, 5.0)
    recipe = script.Recipe()
    target, drafter = script.build_pair(recipe, texts / "out")
    report = script.evaluate(target, drafter, texts / "work", recipe, torch.device("cpu"))
    fresh = script.evaluate(*script.build_pair(recipe, None), texts / "work", recipe, torch.device("cpu"))

    for kind, row in report.items():
        assert row["target_loss"] < fresh[kind]["target_loss"] - 1
        assert row["top1_agreement"] > fresh[kind]["top1_agreement"]


def test_it_begins_as_a_pair_that_there_is(script, texts):
    train(script, texts, 0.2)
    (texts / "work").rename(texts / "other")
    ended = run(script, texts, "--joint-minutes", "0", "--start-from", str(texts / "out"))

    assert ended.exit_code == 0, ended.exception
    assert (texts / "work" / "tokenizer" / "tokenizer.json").read_text() == (
        texts / "other" / "tokenizer" / "tokenizer.json"
    ).read_text()


def test_interrupted_it_keeps_what_it_learned_and_leaves_the_old_pair_whole(script, texts, monkeypatch):
    train(script, texts, 0.2)
    before = files_of(texts / "out")
    at_least = count()

    def batch(*_):
        if next(at_least) == 7:
            raise KeyboardInterrupt
        return usual(*_)

    usual = script.TokenSampler.batch
    monkeypatch.setattr(script.TokenSampler, "batch", batch)
    ended = run(script, texts, "--joint-minutes", "1")

    assert isinstance(ended.exception, Interrupted)
    assert torch.load(texts / "work" / "joint.pt", weights_only=True)["step"] == 11 + 7
    assert files_of(texts / "out") == before
    assert train(script, texts, 1.0)["step"] > 18 + 7
    assert files_of(texts / "out") != before


@pytest.mark.parametrize(
    "fault", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=["interrupted", "full disk"]
)
def test_a_pair_is_written_whole_or_not_at_all(script, texts, fault, monkeypatch):
    train(script, texts, 0.2)
    before = files_of(texts / "out")
    written = count()
    usual = LlamaForCausalLM.save_pretrained

    def save(model, folder):
        if next(written):  # the drafter
            raise fault
        usual(model, folder)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save)
    ended = run(script, texts, "--joint-minutes", "0.4")

    assert ended.exit_code
    assert files_of(texts / "out") == before
    assert [path.name for path in texts.iterdir() if "out" in path.name] == ["out"]


def test_a_folder_of_other_things_is_not_replaced_by_a_pair(script, texts):
    (texts / "out").mkdir()
    (texts / "out" / "thesis.txt").write_text("years of work")
    ended = run(script, texts)

    assert isinstance(ended.exception, YggdrasilError)
    assert re.search("--out .*out holds thesis.txt, which is none of a pair's files", str(ended.exception))
    assert not (texts / "work").exists()


def files_of(folder):
    """Every file's content and who may read it."""
    return {path: (path.read_bytes(), path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("kind", "changes"), [("held out", {"sequence_length": 999}), ("learned from", {"long_sequence_length": 99_999})]
)
def test_too_little_text_is_told_before_any_training(script, texts, kind, changes, monkeypatch):
    """No window of it could be drawn, or nothing be judged."""
    monkeypatch.setattr(script, "Recipe", partial(script.Recipe, **changes))
    monkeypatch.setattr(script, "run_joint", None)
    ended = run(script, texts)

    assert isinstance(ended.exception, YggdrasilError)
    assert re.search(rf"too little code in .*code: .* {kind}, .* give more", str(ended.exception))
    assert not (texts / "work" / "prepared.json").exists()


@pytest.mark.parametrize(
    "options",
    [["--data-statement", "none.md"], ["--start-from", "nowhere"], ["--joint-minutes", "-1"], ["--out", __file__]],
    ids=" ".join,
)
def test_what_nobody_can_mean_is_refused_before_any_work(script, texts, options):
    ended = run(script, texts, *options)

    assert isinstance(ended.exception, YggdrasilError) or ended.exit_code == 2
    assert options[0] in f"{ended.exception} {ended.output}"
    assert not (texts / "work").exists()


def test_a_smaller_target_begins_as_a_part_of_its_teacher_and_is_stored_in_eight_bits(tmp_path):
    from pair_smaller import begin_as, round_to_eight_bits
    from transformers import LlamaConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "tie_word_embeddings": True}
    teacher = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, intermediate_size=24, **sizes))
    student = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, intermediate_size=8, **sizes))
    begin_as(student, teacher, torch.arange(20).view(2, 10))

    theirs, ours = teacher.model.layers, student.model.layers
    assert torch.equal(ours[1].self_attn.q_proj.weight, theirs[2].self_attn.q_proj.weight)
    assert {tuple(row) for row in ours[0].mlp.up_proj.weight.tolist()} <= {
        tuple(row) for row in theirs[0].mlp.up_proj.weight.tolist()
    }
    student.to(torch.bfloat16).save_pretrained(tmp_path)
    round_to_eight_bits(tmp_path)
    read = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in student.float().named_parameters():
        assert torch.allclose(dict(read.named_parameters())[name], weight, rtol=0.07, atol=0.002), name
