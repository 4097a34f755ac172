"""Training a head: what is learned is what drafting does, it learns, and it goes on where it stopped."""

import json
import os
import re
import shutil
import sys
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from full_disk import full_disk
from head_files import Reference, eagle_config, published_tensors, write_head
from own_texts import RecordedLines, write_own_text
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tiny_pair import chat_tokenizer, random_model
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
)

from yggdrasil.calibration.own_text import Document, text_file
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.tensors import read_tensors
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.prompts import CHAT_PROMPTS, encode_chat, read_prompts
from yggdrasil.runtime.loading import load_model, prepare_model
from yggdrasil.training import run, training
from yggdrasil.training.eagle import EagleRecipe
from yggdrasil.training.estimate import Estimate
from yggdrasil.training.features import Features, Kept, shards, stack_windows
from yggdrasil.training.objective import Teacher, count_hits, loss_of
from yggdrasil.training.run import _has_settled
from yggdrasil.training.settings import SHOWN, TrainSettings
from yggdrasil.training.start import copy_norm, load_start_head, settings_for
from yggdrasil.training.state import KeptTraining, Look, Training, _digest
from yggdrasil.training.target_head import TargetHead
from yggdrasil.training.training import train
from yggdrasil.training.unroll import Batch, StepOutput, unroll
from yggdrasil.training.windows import Window, split

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A random head and the tensors that its twin reads."""
    config = eagle_config()
    tensors = published_tensors(config)
    head, _ = open_head(write_head(tmp_path_factory.mktemp("head"), config, tensors), torch.float32)
    return config, tensors, head


def windows(count, seed=0, length=9, answer=3):
    """Random windows with random states of a target 32 wide."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Kept(
            torch.randint(0, 64, (length + i,), generator=generator),
            torch.randn(length + i, 96, generator=generator),
            torch.randn(length + i, 32, generator=generator),
            answer,
        )
        for i in range(count)
    ]


def test_unrolled_steps_are_drafted_rows(opened):
    """Every learned place of every step, against a head that reads certain rows and then its own outputs."""
    config, tensors, head = opened
    embedding = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    twin = Reference(config, tensors, embedding)
    items = windows(2)
    batch = stack_windows(items)
    places = list(zip(*(each.tolist() for each in batch.places), strict=True))
    for step, (logits, reached) in enumerate(unroll(head, embedding, batch, 3)):
        at = [place for place, is_reached in zip(places, reached.tolist(), strict=True) if is_reached]
        assert len(at) == len(logits) > 5
        for (window, position), row in zip(at, logits, strict=True):
            wanted = drafted_logits(twin, items[window], position, step)
            torch.testing.assert_close(row, wanted, rtol=1e-4, atol=1e-4)


def drafted_logits(twin, item, position, step):
    """Of the token after ``position``, with the last ``step`` tokens before it drafted."""
    certain = position - step  # rows of tokens 1 .. certain read the target's states
    features = twin.feature(item.states[:certain])
    for extra in range(step + 1):
        length = certain + extra
        rows = torch.arange(length)
        outputs, logits = twin.rows(item.tokens[1 : length + 1], features, rows, rows[:, None] >= rows)
        features = torch.cat([features, twin.next_feature(outputs[-1:])])
    return logits[-1]


def test_learned_places_are_those_before_an_answers_tokens_and_a_prompts():
    answers, all_of_them = (stack_windows(windows(2, length=5, answer=3), learns_prompts=too) for too in (False, True))

    assert answers.learned.nonzero().tolist() == [[0, 2], [0, 3], [1, 2], [1, 3], [1, 4]]
    assert all_of_them.learned.nonzero().tolist() == [[w, place] for w in (0, 1) for place in range(1, 4 + w)]


def test_a_head_learns_a_batch(opened):
    """Loss falls and first guesses become the target's choices; a token that cannot be drafted is never one."""
    head, average = (open_copy(opened) for _ in range(2))
    vocabulary = head.target_tokens(torch.arange(40))
    embedding, teacher = torch.randn(64, 32), Teacher(TargetHead(torch.randn(40, 32) * 3), vocabulary, 64)
    items = []
    for item in windows(6):
        tokens = item.tokens.clone()
        tokens[1:] = vocabulary[(item.last @ teacher._head.rows.T).argmax(-1)][:-1]  # what the target chooses
        items.append(item._replace(tokens=tokens))
    batch = stack_windows(items)
    training = Training(head, average, 3e-3)

    def measured(model):
        loss = loss_of(unroll(model, embedding, batch, 3), teacher, batch)
        return loss, count_hits(unroll(model, embedding, batch, SHOWN), teacher, batch)

    before = measured(head)
    for step in range(60):
        measured(head)[0].backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.update_average(step)
    after = measured(average)

    assert after[0] < 0.6 * before[0]
    assert after[1][0, 0] > 2 * max(before[1][0, 0], 3)
    assert (after[1][:, 0] <= after[1][:, 1]).all()
    assert (after[1][:, 1] <= after[1][:, 2]).all()


def open_copy(opened):
    head = open_head_of(opened[0], opened[1])
    return head.requires_grad_(True)


def open_head_of(config, tensors):
    from yggdrasil.drafters.heads.eagle.config import settings_of
    from yggdrasil.drafters.heads.eagle.eagle3 import EagleHead

    head = EagleHead(settings_of(config))
    head.load_state_dict({name: tensor.clone() for name, tensor in tensors.items() if name != "t2d"})
    return head


def test_later_documents_leave_earlier_lots_as_they_are():
    texts = [Window([i], 0, 0) for i in range(1100)]

    early, late = shards(texts), shards([*texts, *texts])

    assert late[:16] == early[:16]
    assert sorted(window.tokens[0] for shard in early for window in shard) == list(range(1100))


def test_states_of_shorter_ends_of_prompts_are_not_taken_for_those_of_longer_ones(target, tmp_path):
    loaded = load_model(str(target), torch.float32, torch.device("cpu"), 1, pack=False)
    features = Features(loaded, (0,), tmp_path)
    for start in (2, 0):
        windows = [Window([5, 6, 7, 8, 9 + i], start, 3 - start) for i in range(3)]
        kept = features.load_or_compute("lot", windows)
        assert [item.tokens.tolist() for item in kept] == [window.tokens[start:] for window in windows]
        assert features.has("lot", windows)


def test_states_of_a_lot_that_grows_take_the_place_of_those_before(target, tmp_path):
    """Every run whose target wrote more would leave a gigabyte behind."""
    loaded = load_model(str(target), torch.float32, torch.device("cpu"), 1, pack=False)
    features = Features(loaded, (0,), tmp_path)
    for name, number in (("lot-1", 1), ("lot-10", 1), ("lot-1", 2)):
        features.load_or_compute(name, [Window([5, 6, 7, 8, 9 + i], 0, 3) for i in range(number)])

    assert sorted(file.name for file in tmp_path.iterdir()) == ["lot-1-2-10.safetensors", "lot-10-1-5.safetensors"]


def test_states_that_cannot_be_kept_or_read_are_read_of_the_target_again(target, tmp_path, monkeypatch):
    loaded = load_model(str(target), torch.float32, torch.device("cpu"), 1, pack=False)
    windows = [Window([5, 6, 7, 8, 9], 0, 3)]
    expected = Features(loaded, (0,), tmp_path).load_or_compute("lot", windows)[0]
    (tmp_path / "file").touch()
    for folder, size in ((tmp_path / "full", 100), (tmp_path / "file" / "below", 1 << 20)):
        with full_disk(size):
            features = Features(loaded, (0,), folder)
            (found,) = features.load_or_compute("lot", windows)
        assert torch.equal(found.states, expected.states)
        assert not folder.exists() or list(folder.iterdir()) == []

    def forbid(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("yggdrasil.training.features.load_file", forbid)
    assert torch.equal(Features(loaded, (0,), tmp_path).load_or_compute("lot", windows)[0].states, expected.states)


def test_states_of_a_target_that_bounds_its_scores_are_those_of_transformers(tmp_path):
    """PyTorch's attention does not: transformers refuses Gemma 2 with it."""
    torch.manual_seed(0)
    config = Gemma2Config(**TINY, attn_logit_softcapping=0.5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    texts = [Window([5, 6, 7, 8, 9], 0, 3), Window([5, 6, 7], 0, 2)]
    with torch.no_grad():
        plain = [
            model(torch.tensor([text.tokens]), output_hidden_states=True, use_cache=False).hidden_states
            for text in texts
        ]
    loaded = prepare_model(model, "gemma2", num_threads=1, pack=False)

    for item, expected in zip(Features(loaded, (0,), tmp_path).load_or_compute("lot", texts), plain, strict=True):
        torch.testing.assert_close(item.states, expected[1][0].bfloat16(), rtol=0.02, atol=0.02)
        torch.testing.assert_close(item.last, expected[-1][0].bfloat16(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY),
        GraniteConfig(**TINY, logits_scaling=8.0),
        Gemma2Config(**TINY, final_logit_softcapping=2.0),
        PhiConfig(**TINY, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    ],
    ids=["plain", "scaled", "bounded", "with a bias"],
)
def test_the_law_that_is_learned_is_the_targets(config):
    """Whatever its family does to logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(50)
        for bias in [model.lm_head.bias] if model.lm_head.bias is not None else []:
            bias.copy_(torch.randn_like(bias))
    tokens, vocabulary = torch.tensor([[3, 9, 60, 1, 8]]), torch.arange(0, 64, 2)
    with torch.no_grad():
        plain = model(tokens, output_hidden_states=True, use_cache=False)
    loaded, last = prepare_model(model, "it", num_threads=1, pack=False), plain.hidden_states[-1]
    expected = plain.logits[0, :-1, vocabulary].softmax(-1)

    laws = Teacher.of(loaded, vocabulary).probabilities(Batch(tokens, last, last, torch.arange(5)[None] < 4))

    assert expected.std() > 0.01
    torch.testing.assert_close(laws, expected)


def test_a_training_ends_when_nothing_improves():
    def look(share):
        return Look(1.0, 1, 1.0, [share] * 5, [share] * 5)

    assert not _has_settled([look(0.01 * i) for i in range(40)])
    assert _has_settled([look(0.3)] * 13)
    assert not _has_settled([look(0.3)] * 12)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny chat model in a folder, and texts that it wrote, in a cache of their own."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = chat_tokenizer()
    model = random_model(vocab_size=len(tokenizer), num_hidden_layers=6)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def written(target, tmp_path, monkeypatch):
    """Texts to learn from; nothing more is to be written."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    write_own_text(target)
    return settings_in(tmp_path, target)


@pytest.fixture(scope="module")
def once(target, tmp_path_factory):
    """The folder of a training that has made one step, with its cache."""
    folder = tmp_path_factory.mktemp("once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YGGDRASIL_CACHE", str(folder / "cache"))
        write_own_text(target)
        train(settings_in(folder, target), RecordedLines())
    return folder


@pytest.fixture
def trained(once, target, tmp_path, monkeypatch):
    """The same, to go on with."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    return settings_in(tmp_path, target)


def settings_in(folder, target):
    return TrainSettings(str(target), folder / "head", minutes=0.0, tokens=1, threads=1)


def progress_of(settings):
    """How far the training is that lies beside the drafter."""
    return KeptTraining.read(settings.work, Source.find(settings.target).fingerprint(), print).progress


def test_a_training_goes_on_and_writes_a_head_that_loads(written):
    """Without time a run makes one step; the second begins where the first stopped, in the same vocabulary."""
    reporter = RecordedLines()
    train(written, reporter)
    first = progress_of(written)
    train(written, reporter)
    second = progress_of(written)

    assert (first.steps, second.steps) == (1, 2)
    assert first.tokens == 2 * (1 + 5), "of each of two texts the prompt's third token and the answer's"
    assert second.tokens > first.tokens
    assert [look.tokens for look in second.looks] == [first.tokens, second.tokens]
    assert len(reporter.lines) == 4
    assert ["no plan says what passes of" in line for line in reporter.lines] == [True, False] * 2
    head, embedding = open_head(written.out, torch.bfloat16)
    assert embedding is None
    assert head.settings.readings(6) == [(1, 2, 2)], "as it was trained: nobody has to guess"
    names = set(read_tensors(written.out))
    config = json.loads((written.out / "config.json").read_text())
    spelled = published_tensors({**config, "draft_vocab_size": config["draft_vocab_size"]})
    assert names == set(spelled)
    assert "tokens learned" in (written.out / "README.md").read_text()


def test_what_a_head_would_save_is_told_at_every_look_and_on_its_card(written, target, monkeypatch):
    asked = []
    estimate = Estimate("mine", StepCosts(1.0, {1: 1.0}, {1: 4.0, 8: 5.0}, 0.0, 4.0), is_estimated=False)
    monkeypatch.setattr(run, "estimate_from_plans", lambda *given: asked.append(given) or estimate)
    reporter = RecordedLines()
    train(written, reporter)

    look, said = reporter.lines
    assert "agreement" in look
    assert re.fullmatch(r" +this head alone would .*decod.* \(by the step costs of plan mine\)", said)
    assert f"| estimated | {said.strip()} |" in (written.out / "README.md").read_text()
    drafter = sum(tensor.numel() for name, tensor in open_head(written.out, torch.float32)[0].named_parameters())
    whole = sum(each.numel() for each in AutoModelForCausalLM.from_pretrained(target).parameters())
    share = pytest.approx(drafter * 5 / 8 / (whole * 2))
    assert asked == [(Source.find(target).fingerprint(), "full", "cpu", share, "eagle3")]


@pytest.mark.parametrize(
    ("device", "file_size", "share"),
    [
        ("cpu", None, 60 * 5 / 8 / (600 * 2)),  # five bits a weight beside bfloat16
        ("cpu", 300, 60 * 5 / 8 / 300),  # beside the blocks of a file
        ("cuda", None, 60 / 600),  # both in bfloat16
    ],
)
def test_what_a_pass_of_a_drafter_reads_is_told_by_its_weights(tmp_path, device, file_size, share):
    file = None if file_size is None else tmp_path / "it.gguf"
    if file is not None:
        file.write_bytes(bytes(file_size))
    begun = SimpleNamespace(
        _settings=TrainSettings("it", tmp_path, device=device),
        _training=SimpleNamespace(head=torch.nn.Linear(6, 10, bias=False)),
    )
    loaded = SimpleNamespace(model=torch.nn.Linear(20, 30, bias=False), hidden_size=4)

    assert run.TrainingRun._weights_share(begun, loaded, SimpleNamespace(gguf=file)) == pytest.approx(share)


def test_a_training_begins_as_another_head(trained, tmp_path):
    """Its weights and its vocabulary, whatever the texts say; and goes on with its own from then on."""
    first, _ = open_head(trained.out, torch.float32)
    later = replace(trained, out=tmp_path / "later", start=trained.out)
    text = text_file(Source.find(trained.target).fingerprint(), "full")
    text.write_text(text.read_text().replace("10, 11, 12", "20, 21, 22"))
    train(later, RecordedLines())
    kept = KeptTraining.read(later.work, Source.find(trained.target).fingerprint(), print)

    assert kept.progress.steps == 1
    for name, tensor in first.state_dict().items():
        moved = (kept.tensors[f"head.{name}"] - tensor).abs().max()
        assert moved == 0 if name == "d2t" else moved < 1e-3, f"{name}: one step of the first rate"
    train(replace(later, start=None), RecordedLines())
    assert progress_of(later).steps == 2
    assert "| began as | head; the mean " in (later.out / "README.md").read_text()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY, rope_scaling={"type": "linear", "factor": 2.0}),
        Gemma3TextConfig(**TINY),
    ],
    ids=["rotary positions in an older form", "that differ by layer"],
)
def test_a_head_that_was_trained_for_a_target_fits_it(config, tmp_path):
    loaded = prepare_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), "it", 1, pack=False)
    recipe = EagleRecipe(loaded, torch.arange(40))
    recipe.write(recipe.initial(), tmp_path)

    assert load_start_head(tmp_path, loaded).settings.rope == settings_for(loaded, 40).rope


@pytest.mark.parametrize("bias", [0.0, 3.0])
def test_the_factors_of_a_layer_norm_are_copied_without_its_bias(bias):
    theirs, ours = nn.LayerNorm(8), nn.RMSNorm(8)
    nn.init.uniform_(theirs.weight, 0.5, 2.0)
    nn.init.constant_(theirs.bias, bias)
    with torch.no_grad():
        copy_norm(ours, theirs, 8)
    torch.testing.assert_close(ours.weight, theirs.weight)


def test_another_process_that_writes_takes_no_time_of_a_training(written, seconds, monkeypatch):
    """It would end with its first step, and write a head that has learned nothing."""
    own_text = training._own_text

    def late(*given):
        documents, _ = own_text(*given)
        for _ in range(3600):
            next(seconds)
        return documents, 3600.0

    monkeypatch.setattr(training, "_own_text", late)
    train(replace(written, minutes=3.0), RecordedLines())
    assert progress_of(written).steps > 3


@pytest.mark.parametrize(
    ("tokens", "minutes"), [(20_000, 2.0), (None, 2.0)], ids=["so many tokens", "after long training"]
)
def test_text_leaves_time_to_learn_it(trained, seconds, monkeypatch, tokens, minutes):
    """A run wrote text for as long as that took, and then a head that had learned nothing."""
    file = trained.work / "state.safetensors"
    kept = KeptTraining.read(trained.work, Source.find(trained.target).fingerprint(), print)
    kept.progress.seconds = 3600.0
    said = json.dumps(asdict(kept.progress))
    save_file(kept.tensors, file, {"progress": said, "digest": _digest(said, kept.tensors)})
    monkeypatch.setattr("yggdrasil.calibration.own_text.monotonic", lambda: float(next(seconds)))
    began = next(seconds)
    train(replace(trained, minutes=minutes, tokens=tokens), RecordedLines())

    assert next(seconds) - began < 60 * minutes + 10
    assert progress_of(trained).steps > 5


@pytest.mark.usefixtures("seconds")
def test_what_is_written_is_the_mean_with_the_head_that_it_began_as(trained, tmp_path):
    """Of a training that goes on, too."""
    begun, _ = open_head(trained.out, torch.float32)
    later = replace(trained, out=tmp_path / "later", start=trained.out, minutes=3.0)
    train(later, RecordedLines())
    train(replace(later, start=None), RecordedLines())
    learned = KeptTraining.read(later.work, Source.find(trained.target).fingerprint(), print).tensors
    result, _ = open_head(later.out, torch.float32)

    has_moved = []
    for name, tensor in begun.named_parameters():
        average = learned[f"average.{name}"]
        mean, rounding = (tensor + average) / 2, 0.005 * average.abs().max()
        assert (result.state_dict()[name] - mean).abs().max() <= rounding, f"{name}: written in bfloat16"
        has_moved.append((average - mean).abs().max() > 2 * rounding)
    assert any(has_moved), "it learned enough for the mean to be another head"


def test_a_head_that_does_not_fit_is_refused_before_anything_is_written(written, target, tmp_path):
    other = write_head(tmp_path / "other", eagle_config(), published_tensors(eagle_config()))
    with pytest.raises(
        YggdrasilError, match=r"other is not as heads are .*\(other .*vocab_size.*\); leave --start out"
    ):
        train(replace(written, start=other, tokens=10**9), RecordedLines())
    with pytest.raises(YggdrasilError, match="is no folder of an EAGLE-3 head"):
        train(replace(written, start=target), RecordedLines())
    assert not written.out.exists()
    assert not written.work.exists()


@pytest.fixture
def seconds(monkeypatch):
    """Somebody looks at the clock a few times a step; each time it is a second later."""
    passed = count()
    for module in ("training", "run"):
        monkeypatch.setattr(f"yggdrasil.training.{module}.monotonic", lambda: float(next(passed)))
    return passed


@pytest.fixture
def rates(monkeypatch):
    """The rate of learning at every step."""
    noted, follow = [], Training.update_average

    def noting(training, steps):
        noted.append(training.optimizer.param_groups[0]["lr"])
        follow(training, steps)

    monkeypatch.setattr(Training, "update_average", noting)
    return noted


@pytest.mark.usefixtures("seconds")
def test_the_rate_rises_at_first_and_falls_to_nothing_at_a_runs_end(written, rates):
    train(replace(written, minutes=3.0), RecordedLines())

    highest = rates.index(max(rates))
    assert 2 < highest < len(rates) - 2
    assert all(np.diff(rates[: highest + 1]) > 0)
    assert all(np.diff(rates[highest:]) < 0)
    assert rates[-1] < 0.3 * max(rates)


@pytest.mark.slow
def test_a_training_that_nothing_improves_lets_its_rate_fall_before_it_ends(written, seconds, rates, monkeypatch):
    """By its own looks: what an earlier run reached says nothing of a rate that has begun anew."""
    asked = []
    monkeypatch.setattr("yggdrasil.training.run._has_settled", lambda looks: asked.append(len(looks)) or len(looks) > 1)
    train(replace(written, minutes=60.0), RecordedLines())
    assert next(seconds) < 60 * 60 / 2
    assert rates[-1] < 0.3 * max(rates)
    asked.clear()
    train(replace(written, minutes=60.0), RecordedLines())
    assert min(asked) == 0


@pytest.mark.slow
def test_slow_evaluations_are_rare(written, seconds, monkeypatch):
    """With 100 s an evaluation, one begins at least 1,500 s after the last, not every three minutes."""
    began = []

    def slow(*arguments):
        began.append(next(seconds))
        for _ in range(100):
            next(seconds)

    monkeypatch.setattr("yggdrasil.training.run.publish", slow)
    monkeypatch.setattr("yggdrasil.training.run._has_settled", lambda looks: False)
    train(replace(written, minutes=60.0), RecordedLines())
    *during, _ = began  # the last one ends the run
    assert 2 <= len(during) <= 3
    assert all(np.diff(during) >= 1_500)


def test_a_trained_head_drafts_the_same_elsewhere(trained, target, tmp_path, monkeypatch, capsys):
    """A plain forward of the published format, independent of our code; the head has learned enough to be different."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "scripts"), *sys.path])
    import check_head

    monkeypatch.setattr("yggdrasil.drafters.heads.convention._LEAST", 0.0)
    monkeypatch.setattr("yggdrasil.drafters.heads.convention._CLEAR", float("inf"))  # a shaken head guesses nothing
    shaken = read_tensors(trained.out)
    torch.manual_seed(0)
    for name, tensor in shaken.items():
        if tensor.is_floating_point() and tensor.ndim == 2:
            shaken[name] = tensor + 0.2 * torch.randn_like(tensor)
    save_file(shaken, trained.out / "model.safetensors")

    with pytest.raises(typer.Exit) as ended:
        check_head.check(str(target), str(trained.out), texts=2, tokens=12)

    assert ended.value.exit_code == 0
    same, total, different = map(int, re.findall(r"\d+", capsys.readouterr().out))
    assert same == total == 2 * 13
    assert different > 5
    with pytest.raises(YggdrasilError, match="is no folder of an EAGLE-3 head; name one"):
        check_head.check(str(target), str(target), texts=1, tokens=8)


def test_a_folder_of_something_else_is_left_alone(written):
    written.out.mkdir()
    (written.out / "thesis.txt").write_text("mine")

    with pytest.raises(YggdrasilError, match="holds other files"):
        train(written, RecordedLines())
    assert (written.out / "thesis.txt").read_text() == "mine"


def test_which_documents_are_held_out_depends_on_none_that_come_later():
    documents = [Document([number], [1, 2] if number % 5 else [1]) for number in range(100)]
    held_out = [window.tokens[0] for window in split(documents).held_out]

    assert held_out == [1, 41, 81]  # every 32nd that there is something to learn from
    assert split(documents[:70]).held_out == split(documents).held_out[:2]
    assert [window.tokens[0] for window in split(documents).trained] == [
        number for number in range(100) if number % 5 and number not in held_out
    ]


def test_what_is_held_out_is_not_trained_on_when_it_comes_again():
    """Two trainings of one target, each with the same prompts, wrote both into one file."""
    documents = [Document([number], [1, 2]) for number in range(40)]
    parts = split([*documents, *reversed(documents)])

    assert [window.tokens[0] for window in parts.held_out] == [0, 32, 32, 0]
    assert len(parts.trained) == 2 * 38


def test_texts_of_one_prompt_are_split_by_their_answers():
    """Such as texts that are all behind the same instruction, of which one side had all."""
    documents = [Document([5, 6], [1, 2 + number % 70]) for number in range(110)]
    parts = split([Document([7], [1, 2]), *documents])

    assert [window.tokens for window in parts.held_out] == [[7, 1, 2], *([5, 6, 1, 2 + i] for i in (31, 63, 31))]
    assert len(parts.trained) == 111 - 4, "one in 32 would be number 95, whose answer is number 25's"


def test_why_nothing_can_be_trained_is_said(written, tmp_path):
    """However many texts there are, nothing is held out of equal ones."""
    for number, reason in (
        (3, "there are 3 texts to train on, too few"),
        (50, "there are 50 texts to train on, all alike"),
    ):
        file = tmp_path / "given.jsonl"
        file.write_text('{"prompt": "a", "answer": "b c d"}\n' * number)
        shutil.rmtree(tmp_path / "empty", ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("YGGDRASIL_CACHE", str(tmp_path / "empty"))
            with pytest.raises(YggdrasilError, match=reason):
                train(replace(written, texts=(file,), tokens=None, prompts=()), RecordedLines())


def test_answers_by_which_calibrations_judge_a_drafter_are_not_learned(trained, target):
    """However much of their prompts was kept."""
    learned = card_of(trained)["answers' tokens there are"]
    asked = [encode_chat(load_tokenizer(target), prompt.as_chat().messages) for prompt in read_prompts(CHAT_PROMPTS)]
    file = text_file(Source.find(target).fingerprint(), "full")
    with file.open("a") as lines:
        for prompt in asked:
            lines.write(json.dumps({"prompt": prompt[-200:], "answer": [10, 11, 12]}) + "\n")
    train(trained, RecordedLines())

    assert len(asked) == 48
    assert card_of(trained)["answers' tokens there are"] == learned


def card_of(settings):
    lines = (settings.out / "README.md").read_text().splitlines()
    rows = (re.fullmatch(r"\| (.+) \| (.+) \|", line) for line in lines)
    return dict(row.groups() for row in rows if row is not None)


def test_the_loss_is_that_of_pytorch_with_its_gradients():
    """Over many rows, of steps that do not reach all, of tokens that cannot be drafted."""
    torch.manual_seed(1)
    batch = stack_windows([*windows(9, length=20, answer=1), *windows(1, length=5, answer=1)])
    teacher, count = Teacher(TargetHead(torch.randn(40, 32)), torch.arange(3, 43), 64), int(batch.learned.sum())
    _, positions = batch.places
    reached = [positions - 1 - step >= 0 for step in range(3)]
    logits = [torch.randn(int(each.sum()), 40, requires_grad=True) for each in reached]
    loss = loss_of([StepOutput(*each) for each in zip(logits, reached, strict=True)], teacher, batch)
    loss.backward()
    ours = [each.grad for each in logits]

    laws, can_be_drafted = teacher.probabilities(batch), teacher.choices(batch) >= 0
    again = [each.detach().requires_grad_() for each in logits]
    parts = [
        functional.cross_entropy(each[can_be_drafted[which]], laws[which & can_be_drafted])
        for each, which in zip(again, reached, strict=True)
    ]
    wanted = sum(0.8**step * part for step, part in enumerate(parts)) / sum(0.8**step for step in range(3))
    wanted.backward()
    assert 0 < int(can_be_drafted.sum()) < count > 2 * 64
    assert not reached[2].all()
    torch.testing.assert_close(loss, wanted)
    for each, expected in zip(ours, again, strict=True):
        torch.testing.assert_close(each, expected.grad)


def test_a_batch_of_which_nothing_can_be_drafted_teaches_nothing():
    batch = stack_windows(windows(2))
    teacher = Teacher(TargetHead(torch.randn(4, 32)), torch.arange(64, 68), 68)
    reached = torch.ones(int(batch.learned.sum()), dtype=torch.bool)
    logits = torch.randn(len(reached), 4, requires_grad=True)

    loss = loss_of([StepOutput(logits, reached)], teacher, batch)
    loss.backward()

    assert loss == 0
    assert not logits.grad.any()


def damage(file, how):
    """A number of the vocabulary that is off by one would teach other tokens in silence."""
    content = bytearray(file.read_bytes())
    content[-len(content) // 2] ^= 1
    if how == "a folder":
        file.unlink()
        file.mkdir()
    elif how == "an older one":
        save_file({"head.d2t": torch.zeros(3)}, file, {"progress": "{}"})
    else:
        file.write_bytes(content if how == "a bit" else content[: len(content) // 2])


@pytest.mark.parametrize("how", ["a bit", "an end", "a folder", "an older one"])
def test_a_damaged_state_is_said_and_begun_anew_where_nothing_was_written(trained, how):
    damage(trained.work / "state.safetensors", how)
    shutil.rmtree(trained.out)
    reporter = RecordedLines()
    train(trained, reporter)

    assert "is damaged" in reporter.lines[0]
    assert progress_of(trained).steps == 1


def rewritten(file, change):
    """The state with other content, and the digest of that."""
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        progress = json.loads(opened.metadata()["progress"])
    change(progress, tensors)
    said = json.dumps(progress)
    save_file(tensors, file, {"progress": said, "digest": _digest(said, tensors)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda progress, tensors: progress.update(momentum=1), "unknown key 'momentum'"),
        (lambda progress, tensors: tensors.pop("head.fc.weight"), "head.fc.weight is missing"),
        (lambda progress, tensors: tensors.update({"average.fc.weight": torch.ones(2)}), "shape .2., not .64, 192."),
        (lambda progress, tensors: tensors.update({"exp_avg.fc.weight": torch.ones(2)}), "shape .2., not .64, 192."),
        (lambda progress, tensors: tensors.update({"begun.fc.weight": torch.ones(64, 192)}), "begun.* is missing"),
    ],
    ids=["a field", "a name", "a shape", "a moment", "a part of a beginning"],
)
def test_a_state_of_another_version_is_said_and_stays(trained, change, reason):
    """It holds hours of training, which that version can go on with."""
    file = trained.work / "state.safetensors"
    rewritten(file, change)
    content = file.read_bytes()
    with pytest.raises(YggdrasilError, match=rf"state.safetensors was written by another version .*{reason}.*--out"):
        train(trained, RecordedLines())

    assert file.read_bytes() == content


@pytest.mark.parametrize("size", [0, 1000])
def test_states_that_were_cut_short_are_made_again(trained, size):
    for file in (trained.work / "states").iterdir():
        os.truncate(file, size)
    train(trained, RecordedLines())

    assert progress_of(trained).steps == 2


def test_states_on_another_disk_go_with_their_training(written, tmp_path):
    """Those of another training have other layers."""
    (disk := tmp_path / "disk").mkdir()
    (disk / "old").touch()
    written.work.mkdir()
    (written.work / "states").symlink_to(disk)
    train(written, RecordedLines())

    assert "old" not in {file.name for file in disk.iterdir()}
    assert (written.work / "states").is_symlink()


def test_interrupted_in_its_last_look_a_training_keeps_what_it_learned(written, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("yggdrasil.training.run.count_hits", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(written, RecordedLines())
    assert progress_of(written).steps == 1
    train(written, RecordedLines())
    assert progress_of(written).steps == 2


def other_target(settings, target, tmp_path):
    shutil.copytree(target, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    return replace(settings, target=str(tmp_path / "other")), "a training of another target"


def damaged_state(settings, target, tmp_path):
    damage(settings.work / "state.safetensors", "a bit")
    return settings, "holds a drafter, and nothing in .*head.training goes on with it"


def no_state(settings, target, tmp_path):
    shutil.rmtree(settings.work)
    return settings, "holds a drafter, and nothing in .*head.training goes on with it"


def other_start(settings, target, tmp_path):
    """Of the same name as the one that it began as."""
    first = replace(settings, out=tmp_path / "one" / "head")
    train(first, RecordedLines())
    shutil.rmtree(settings.out)
    shutil.rmtree(settings.work)
    train(replace(settings, start=first.out), RecordedLines())
    train(replace(settings, start=first.out), RecordedLines())
    assert progress_of(settings).steps == 2, "it did begin as that one"
    tensors = read_tensors(first.out)
    write_head(
        tmp_path / "two" / "head",
        json.loads((first.out / "config.json").read_text()),
        {
            **tensors,
            "norm.weight": tensors["norm.weight"] + 1,
        },
    )
    sentence = "nothing says that the training in .* began as .*two/head; leave it out"
    return replace(settings, start=tmp_path / "two" / "head"), sentence


@pytest.mark.parametrize("change", [other_target, damaged_state, no_state, other_start])
def test_a_drafter_is_replaced_by_none_but_the_training_that_made_it(trained, target, tmp_path, change):
    """It may have taken hours, and the first look of another one would take its place."""
    settings, sentence = change(trained, target, tmp_path)
    files = {file.name: file.read_bytes() for file in trained.out.iterdir()}
    with pytest.raises(YggdrasilError, match=sentence):
        train(settings, RecordedLines())

    assert {file.name: file.read_bytes() for file in trained.out.iterdir()} == files


def test_a_full_disk_is_a_sentence_that_names_the_drafter(written, monkeypatch):
    def full(*arguments, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("yggdrasil.training.eagle.save_file", full)
    with pytest.raises(YggdrasilError, match=f"cannot write {written.out} .*No space left"):
        train(written, RecordedLines())
