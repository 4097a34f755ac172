"""Training a DFlash head: its blocks are those of drafting, it learns, and it is written as published."""

import json
from dataclasses import replace
from itertools import count

import pytest
import torch
from block_files import BlockReference, block_shapes
from own_texts import RecordedLines, write_own_text
from tiny_pair import chat_tokenizer, make_pair, random_model

from yggdrasil.calibration.own_text import text_file
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.heads.tensors import read_tensors
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.training.dflash import DFlashRecipe, choose_anchors
from yggdrasil.training.features import Kept, stack_windows
from yggdrasil.training.settings import TrainSettings
from yggdrasil.training.training import train
from yggdrasil.tree.shape import TreeShape

VOCABULARY = torch.arange(3, 60)  # tokens of the loss
STATES = 3 * 64


@pytest.fixture
def pair():
    return make_pair(num_hidden_layers=6)


@pytest.fixture
def recipe(pair):
    return DFlashRecipe(prepare_model(pair.plain_target, "it", 1, pack=False), VOCABULARY)


def windows(*lengths):
    """Random windows with random states, the third token of each the first of its answer."""
    generator = torch.Generator().manual_seed(0)
    return [
        Kept(
            torch.randint(0, 96, (length,), generator=generator),
            torch.randn(length, STATES, generator=generator),
            torch.randn(length, 64, generator=generator),
            2,
        )
        for length in lengths
    ]


def test_the_blocks_of_a_batch_are_those_of_drafting(pair, recipe, tmp_path):
    """Every trained token of every row, against the plain forward of the format over the text before its anchor."""
    head, items = recipe.initial(), windows(30, 17)
    batch = stack_windows(items)
    recipe.write(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    embedding, output = (pair.plain_target.get_input_embeddings().weight, pair.plain_target.get_output_embeddings())
    tensors = dict(head.state_dict())
    twin = BlockReference(config, tensors, embedding, output.weight[VOCABULARY], [(0, False)] * 2)
    with torch.no_grad():
        anchors, exists = choose_anchors(batch.learned)
        found = list(recipe.steps(head, batch, 7))

    assert {name: tuple(tensor.shape) for name, tensor in read_tensors(tmp_path).items()} == block_shapes(config)
    assert [int(each.sum()) for each in exists] == [7, 7]
    places = list(zip(*(each.tolist() for each in batch.places), strict=True))
    for step, (logits, reached) in enumerate(found):
        at = [place for place, is_reached in zip(places, reached.tolist(), strict=True) if is_reached]
        assert len(at) == len(logits) > 3
        for (window, position), row in zip(at, logits, strict=True):
            anchor = position - step
            assert anchor in anchors[window]
            with torch.no_grad():
                said = twin.logits(items[window].states[:anchor], items[window].tokens, [anchor])[0, step]
            torch.testing.assert_close(row, said, rtol=1e-3, atol=1e-3)


def test_anchors_are_trained_tokens_and_others_in_every_step():
    learned = torch.arange(40)[None] >= torch.tensor([[8], [30]])
    drawn = [choose_anchors(learned) for _ in range(4)]
    with torch.no_grad():
        fixed = [choose_anchors(learned)[0] for _ in range(2)]

    for anchors, exists in drawn:
        assert [int(each.sum()) for each in exists] == [8, 8]
        assert learned.gather(1, anchors)[exists].all()
    assert len({str(anchors) for anchors, _ in drawn}) == 4
    assert torch.equal(*fixed)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A tiny chat target in a folder that has answered seven prompts; a look at the clock takes a second."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    passed = count()
    for module in ("training", "run"):
        monkeypatch.setattr(f"yggdrasil.training.{module}.monotonic", lambda: float(next(passed)))
    tokenizer = chat_tokenizer()
    model = random_model(vocab_size=len(tokenizer), num_hidden_layers=6)
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    target = str(tmp_path / "target")
    write_own_text(target)  # makes the folder
    answers = []
    for prompt in ([5, 6 + i, 8] for i in range(7)):
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)[0, 3:]
        answers.append(json.dumps({"prompt": prompt, "answer": answer.tolist()}))
    text_file(Source.find(target).fingerprint(), "full").write_text("\n".join(10 * answers) + "\n")
    return TrainSettings(target, tmp_path / "head", "dflash", minutes=0.0, tokens=1, threads=1)


@pytest.mark.slow
def test_a_trained_head_drafts_more_than_an_untrained_one_and_the_text_is_the_targets(settings):
    untrained = replace(settings, out=settings.out.with_name("untrained"))
    train(untrained, RecordedLines())
    train(replace(settings, minutes=20.0), reporter := RecordedLines())
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in reporter.lines if "loss " in line]
    pair = make_pair_of(settings.target)
    decoders = [
        pair.decoder(FixedPolicy(TreeShape(2, 4, 8)), drafter=load_head(each.out, pair.target, 1))
        for each in (untrained, settings)
    ]
    lengths = []
    for decoder in decoders:
        results = [decoder.generate([5, 6 + i, 8], max_new_tokens=24) for i in range(4)]
        assert [result.tokens for result in results] == [pair.reference([5, 6 + i, 8], 24) for i in range(4)]
        lengths.append(sum(result.metrics.aal for result in results) / 4)

    assert losses[-1] < 0.8 * losses[0]
    assert lengths[1] > lengths[0] + 0.3


def make_pair_of(folder):
    from tiny_pair import TinyPair
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return TinyPair(prepare_model(model, "it", 1), None, plain, None)


def test_a_training_goes_on_with_its_own_kind_alone(settings, tmp_path):
    train(settings, RecordedLines())
    train(settings, RecordedLines())
    assert (settings.out / "README.md").read_text().startswith("# DFlash head")

    with pytest.raises(YggdrasilError, match="is of a training of --kind dflash; name that kind, or another --out"):
        train(replace(settings, kind="eagle3"), RecordedLines())
    with pytest.raises(YggdrasilError, match="--start names an EAGLE-3 head, not one of --kind dflash"):
        train(replace(settings, start=tmp_path), RecordedLines())
