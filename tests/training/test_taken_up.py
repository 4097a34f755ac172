"""A head that an earlier training left: the next start drafts with it where it pays, and nowhere else."""

import shutil
from dataclasses import replace

import pytest
from own_texts import RecordedLines, write_own_text
from tiny_pair import chat_tokenizer, random_model

from yggdrasil import pretrained
from yggdrasil.artifacts import model_fingerprint
from yggdrasil.cli.open_decoder import open_decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.pretrained import Decoder
from yggdrasil.scheduling.plan import Costs
from yggdrasil.training.settings import TrainSettings
from yggdrasil.training.state import KeptTraining, held_out_agreement
from yggdrasil.training.training import train

PROMPT = "the only way, on an inner tour. the only way"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, the text that it wrote, and the head of a training that made one step."""
    folder = tmp_path_factory.mktemp("trained")
    tokenizer = chat_tokenizer()
    model = random_model(vocab_size=len(tokenizer), num_hidden_layers=6, max_position_embeddings=512, eos_token_id=0)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YGGDRASIL_CACHE", str(folder / "cache"))
        write_own_text(folder / "target")
        train(settings_in(folder), RecordedLines())
    return folder


@pytest.fixture
def trained(folder, tmp_path, monkeypatch):
    """Settings of that training, in a copy of the folder."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return settings_in(tmp_path)


def settings_in(folder):
    return TrainSettings(str(folder / "target"), folder / "head", minutes=0.0, tokens=1, threads=1)


def opened(settings, **options):
    return open_decoder(settings.target, "float32", force_machine=False, device="cpu", backend="eager", **options)


def drafted_trees(answer):
    return sum(count for width, count in answer.metrics.draft_widths.items() if width)


def test_the_next_start_has_the_head_and_what_its_training_knows(trained, capsys):
    decoder = opened(trained, train=trained.out)
    first = decoder.plan
    agreement = KeptTraining.read(trained.work, first.target.fingerprint, print).progress.looks[-1].agreement
    assert first.drafter.fingerprint == model_fingerprint(trained.out)
    assert first.agreement == tuple(agreement)
    assert first.costs[0].head_ms > 0
    assert opened(trained).plan.drafter is None, "without the option nothing changes"
    assert opened(trained, drafter=str(trained.out)).plan.costs == first.costs, "nothing is timed again"
    train(replace(trained, minutes=0.05), RecordedLines())
    capsys.readouterr()
    second = opened(trained, train=trained.out).plan

    assert "of another draft head; it is created again" in capsys.readouterr().err
    assert second.drafter.fingerprint == model_fingerprint(trained.out) != first.drafter.fingerprint


def test_a_calibrated_plan_keeps_its_drafters(trained):
    plan = opened(trained).plan
    replace(plan, is_provisional=False).save(
        pretrained.find_plan(pretrained.Source.find(trained.target), None, "float32")
    )

    assert opened(trained, train=trained.out).plan.drafter is None


def test_a_plan_and_a_drafter_that_is_not_there_are_refused(trained):
    opened(trained)
    plan = pretrained.find_plan(pretrained.Source.find(trained.target), None, "float32")
    with pytest.raises(YggdrasilError, match="has other drafters; calibrate for"):
        opened(replace(trained, target=str(plan)), drafter=str(trained.out))


@pytest.mark.parametrize(
    "agreement",
    [pytest.param((0.0,) * 5, marks=pytest.mark.slow), (0.95,) * 5],
    ids=["it says so", "it says the opposite"],
)
def test_a_useless_head_does_not_draft(trained, monkeypatch, agreement):
    """By its training, or after a few trees; every iteration takes the time that a large target's would."""
    monkeypatch.setattr(pretrained, "_agreement", lambda *_: agreement)
    observe = ObjectivePolicy.observe

    def observe_predicted(policy, decision, tokens, _):
        observe(policy, decision, tokens, decision.milliseconds)

    monkeypatch.setattr(ObjectivePolicy, "observe", observe_predicted)
    decoder = Decoder.from_pretrained(
        trained.target, drafter=[str(trained.out), "table"], dtype="float32", backend="eager"
    )
    shapes = decoder.plan.shapes
    verify_ms = {width: 20.0 + 0.4 * (width - 1) for width in shapes.verify_widths}
    large = Costs(64, 1.0, dict.fromkeys(shapes.draft_widths, 0.4), verify_ms, overhead_ms=0.1, plain_ms=20.0)
    decoder.use_costs(replace(decoder.plan, costs=[large]))
    answer = decoder.generate(PROMPT, max_new_tokens=150)

    assert answer.tokens == decoder.generate(PROMPT, max_new_tokens=150, speculation=False).tokens
    if agreement[0]:
        assert 1 <= drafted_trees(answer) <= 40
    else:
        assert not drafted_trees(answer)


def test_what_a_training_knows_is_of_its_target_alone(trained, tmp_path):
    identity = pretrained.Source.find(trained.target).fingerprint()
    assert len(held_out_agreement(trained.work, identity)) == 5
    assert held_out_agreement(trained.work, "0" * 16) == ()
    assert held_out_agreement(tmp_path / "nowhere", identity) == ()
    (trained.work / "state.safetensors").write_bytes(b"damaged")
    assert held_out_agreement(trained.work, identity) == ()
