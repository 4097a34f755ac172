"""Training heads that draft the target's states: what is learned is what drafting does, written as published."""

import copy
import json
from functools import partial

import pytest
import torch
from mtp_models import FAMILIES, HIDDEN, PREFIXES, module_shapes, random_module, tiny_target, write_target
from mtp_models import Reference as MtpReference
from other_heads import FirstReference, first_shapes
from own_texts import write_own_text
from safetensors.torch import load_file
from tiny_pair import VOCAB_SIZE, chat_tokenizer, random_model

from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.heads.mtp.files import open_mtp
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loading import load_model, prepare_model
from yggdrasil.training.features import Kept, side_by_side
from yggdrasil.training.objective import Teacher, hits_of, loss_of
from yggdrasil.training.settings import SHOWN, TrainSettings
from yggdrasil.training.start import begun_head
from yggdrasil.training.state import KeptTraining, Training
from yggdrasil.training.states import FirstEagleRecipe, MtpRecipe
from yggdrasil.training.training import train
from yggdrasil.training.vocabulary import draft_vocabulary

DRAFTED = torch.arange(1, VOCAB_SIZE, 2)  # tokens that are told apart
CPU = torch.device("cpu")


class Silent:
    """A teller of nothing."""

    def phase(self, title):
        return lambda fraction: None

    def tell(self, line):
        pass


def opened(folder):
    return load_model(str(folder), torch.float32, CPU, 1, pack=False)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(2)
    model = random_model(vocab_size=VOCAB_SIZE, hidden_size=HIDDEN)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)
    return model


class Trained:
    """A recipe's drafter, shaken, and a forward of its format on the tensors that are written of it."""

    def __init__(self, recipe, folder, twin):
        self.recipe = recipe
        self.model = shaken(recipe.initial())
        folder.mkdir()
        recipe.write(self.model, folder)
        self.folder, self.written = folder, load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        self.twin = twin({name: tensor.float() for name, tensor in self.written.items()}, self.config)


@torch.no_grad()
def shaken(model):
    """With other numbers everywhere, all of which bfloat16 has: what is written is what was trained."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else 0.1))
        parameter.copy_(parameter.bfloat16())
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_()  # which files keep in float32
    return model


@pytest.fixture(params=["eagle", *FAMILIES])
def trained(request, llama, tmp_path):
    torch.manual_seed(4)
    if request.param == "eagle":
        loaded = prepare_model(llama, "it", 1, pack=False)
        embedding, output = llama.model.embed_tokens.weight, llama.lm_head.weight
        return Trained(
            FirstEagleRecipe(loaded, DRAFTED), tmp_path / "head",
            lambda tensors, config: FirstReference(config, tensors, embedding, output),
        )  # fmt: skip
    model = tiny_target(request.param)
    loaded = opened(write_target(tmp_path / "target", request.param, model, {}))
    return Trained(
        MtpRecipe(loaded, DRAFTED), tmp_path / "head", lambda tensors, _: MtpReference(request.param, tensors, model)
    )


def windows(count, length=9, answer=3, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return [
        Kept(
            torch.randint(0, VOCAB_SIZE, (length + i,), generator=generator),
            torch.zeros(length + i, 0),
            torch.randn(length + i, HIDDEN, generator=generator) * scale,
            answer,
        )
        for i in range(count)
    ]


def test_unrolled_steps_are_what_the_written_file_drafts(trained):
    """Every learned place of every step, against a forward of the format that reads states and then its own."""
    items = windows(2)
    batch = side_by_side(items)
    places = list(zip(*(each.tolist() for each in batch.places), strict=True))
    compared = 0
    for step, (logits, reached) in enumerate(trained.recipe.steps(trained.model, batch, 3)):
        at = [place for place, is_reached in zip(places, reached.tolist(), strict=True) if is_reached]
        for (window, position), row in zip(at, logits, strict=True):
            wanted = drafted_logits(trained.twin, items[window], position, step)[DRAFTED]
            torch.testing.assert_close(row, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
            compared += 1
    assert compared > 3 * 5


def drafted_logits(twin, item, position, step):
    """Of the token after ``position``, with the last ``step`` tokens before it drafted."""
    certain = position - step
    features = item.last[:certain]
    for extra in range(step + 1):
        length = certain + extra
        rows = torch.arange(length)
        outputs, logits = twin.rows(item.tokens[1 : length + 1], features, rows, rows[:, None] >= rows)
        features = torch.cat([features, outputs[-1:]])
    return logits[-1]


def test_what_is_written_has_the_published_names_and_loads_as_it_was(trained, llama):
    folder, state = trained.folder, trained.model.state_dict()
    if isinstance(trained.recipe, FirstEagleRecipe):
        assert set(trained.written) == set(first_shapes(trained.config))
        head, own = open_head(folder, torch.float32)
        assert own is None
        assert "draft_vocab_size" not in trained.config, "engines would take it for an EAGLE-3 head"
        assert load_head(folder, prepare_model(llama, "it", 1, pack=False), 1).settings.is_first
    else:
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        family = trained.config["model_type"]
        names = {name for name in module_shapes(family) if not name.endswith(copies)}
        assert set(trained.written) - {"model.norm.weight"} == names
        head = open_mtp(folder, torch.float32)
    assert head.state_dict().keys() == state.keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_a_module_begins_as_the_targets_last_layer(tmp_path):
    for family, reads_state in (("mimo", slice(None, HIDDEN)), ("glm4_moe", slice(HIDDEN, None))):
        loaded = opened(write_target(tmp_path / family, family, tiny_target(family), {}))
        first, again = (MtpRecipe(loaded, DRAFTED).initial() for _ in range(2))
        last = loaded.model.model.layers[-1].state_dict()

        assert {name for name, tensor in first.block.state_dict().items() if torch.equal(tensor, last[name])} == {*last}
        assert torch.equal(first.projection.weight[:, reads_state], torch.eye(HIDDEN))
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, first.state_dict()[name]), name


def test_an_eagle_head_begins_as_the_state_that_it_reads(llama):
    """However often it reads its own output: without a norm, what a layer adds would be added again and again."""
    adds_much = copy.deepcopy(llama)
    with torch.no_grad():
        adds_much.model.layers[-1].mlp.down_proj.weight.mul_(100)
    recipe, batch = FirstEagleRecipe(prepare_model(adds_much, "it", 1, pack=False), DRAFTED), side_by_side(windows(2))
    (first, _), *_, (last, reached) = recipe.steps(recipe.initial(), batch, SHOWN)

    assert last.pow(2).mean() < 2 * first.pow(2).mean()
    assert len(last) == int(reached.sum()) > 0


def test_a_head_learns_the_targets_choices(trained):
    """Loss falls and first guesses become right; tokens that are not told apart are no part of it."""
    recipe, head = trained.recipe, trained.model
    teacher = Teacher.of(recipe._loaded, DRAFTED)
    items = []
    for item in windows(6, scale=3.0):
        tokens = item.tokens.clone()
        tokens[1:] = DRAFTED[teacher._head.logits(item.last).argmax(-1)][:-1]  # what the target chooses
        items.append(item._replace(tokens=tokens))
    batch, training = side_by_side(items), Training(head, recipe.initial(), 3e-3)
    kept = {name: each.clone() for name, each in head.named_parameters() if not each.requires_grad}

    def measured(model):
        return loss_of(recipe.steps(model, batch, 3), teacher, batch)

    before, hits = measured(head).item(), hits_of(recipe.steps(head, batch, SHOWN), teacher, batch)
    for step in range(80):
        measured(head).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.follow(step)
    after = hits_of(recipe.steps(training.average, batch, SHOWN), teacher, batch)

    assert measured(training.average) < 0.7 * before
    assert after[0, 0] > hits[0, 0] + 3
    parameters = dict(head.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in kept.items()), "the target's own norm"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Settings of trainings of a tiny MiMo that has written all that it is to."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    folder = write_target(tmp_path / "target", "mimo", tiny_target("mimo"), random_module("mimo"))
    chat_tokenizer().save_pretrained(folder)
    write_own_text(folder)

    def settings(kind, **more):
        return TrainSettings(str(folder), tmp_path / kind, kind, minutes=0.0, tokens=1, threads=1, **more)

    return settings


def kept_of(settings):
    identity = f"{settings.kind} {Source.find(settings.target).fingerprint()}"
    return KeptTraining.read(settings.work, identity, print)


@pytest.mark.parametrize(("kind", "begins"), [("eagle", False), ("mtp", False), ("mtp", True)])
def test_a_training_goes_on_and_writes_what_is_decoded_with(written, kind, begins, tmp_path, monkeypatch):
    """It tells the most frequent tokens apart, whatever it began as; whoever decodes with it drafts all."""
    monkeypatch.setattr("yggdrasil.training.run.draft_vocabulary", partial(draft_vocabulary, most=7))
    settings = written(kind, start=tmp_path / "target" if begins else None)
    train(settings, Silent())
    train(settings, Silent())

    assert kept_of(settings).progress.steps == 2
    card = (settings.out / "README.md").read_text()
    assert f"| tokens that it learned to tell apart | 7 of {VOCAB_SIZE} |" in card
    head = load_head(settings.out, load_model(settings.target, torch.float32, CPU, 1), 1)
    assert head.settings.is_first
    assert head.settings.draft_vocab_size == VOCAB_SIZE


def test_a_module_goes_on_from_the_one_that_the_target_brings(written, tmp_path):
    """For a target that was tuned without it; one of another shape is refused before anything is written."""
    settings = written("mtp", start=tmp_path / "target")
    train(settings, Silent())
    begun, kept = random_module("mimo"), kept_of(settings).tensors

    layer = PREFIXES["mimo"]
    for name in ("mlp.up_proj.weight", "self_attn.q_proj.bias"):
        moved = (kept[f"head.block.{name}"] - begun[f"{layer}{name}"]).abs().max()
        assert moved < 1e-3, f"{name}: one step of the first rate"
    loaded = opened(write_target(tmp_path / "glm", "glm4_moe", tiny_target("glm4_moe"), random_module("glm4_moe")))
    with pytest.raises(YggdrasilError, match=r"target is not as heads are .*\(other .*layer\); leave --start out"):
        begun_head(tmp_path / "target", "mtp", loaded)
    with pytest.raises(YggdrasilError, match="is no folder of an EAGLE-3 head"):
        begun_head(tmp_path / "target", "eagle3", loaded)


def test_a_target_of_another_family_is_refused_before_it_writes_anything(llama, tmp_path):
    llama.save_pretrained(tmp_path / "target")
    settings = TrainSettings(str(tmp_path / "target"), tmp_path / "mtp", "mtp", tokens=10**9)
    with pytest.raises(YggdrasilError, match=r"--kind mtp: .*target is of the family llama, .*mimo, .*another --kind"):
        train(settings, Silent())

    assert [file.name for file in tmp_path.iterdir()] == ["target"]
