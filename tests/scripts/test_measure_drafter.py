"""What a head is measured to keep is what the engine keeps with it, and its agreement what its first guesses say."""

import importlib
import json
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from head_files import eagle_config, published_tensors, write_head
from other_heads import first_config, first_shapes, medusa_logits, medusa_shapes, random_tensors, write_medusa
from safetensors.torch import load_file
from tiny_pair import TEXT, VOCAB_SIZE, make_pair
from typer.testing import CliRunner

from yggdrasil.calibration.own_text import Document
from yggdrasil.drafters.heads.draft_vocabulary import Vocabulary
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.scheduling.plan import Shapes

PROMPTS = [TEXT[:21], TEXT[30:45], TEXT[50:74]]
COUNT = 40


@pytest.fixture(scope="module")
def script(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(request.config.rootpath / "scripts"))
        yield importlib.import_module("measure_drafter")


@pytest.fixture(scope="module")
def pair():
    return make_pair(num_hidden_layers=6, hidden_size=32)


@pytest.fixture(scope="module")
def documents(pair):
    return [Document(list(prompt), pair.reference(prompt, COUNT)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(documents, tmp_path_factory):
    """A random head that can say what the target will."""
    tokens = sorted({token for document in documents for token in document.answer} | set(range(6)))
    config = {**eagle_config(VOCAB_SIZE), "draft_vocab_size": len(tokens)}
    tensors = published_tensors(config, spelling="midlayer.")
    tensors["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, torch.tensor(tokens), True)
    return write_head(tmp_path_factory.mktemp("measured-head"), config, tensors)


@pytest.fixture(scope="module")
def traces(script, pair, documents, folder):
    """By draft width: chains, and trees."""
    head = load_head(folder, pair.target, 1)
    return {width: script.record(pair.target, head, width, documents, lambda _: None) for width in (1, script.WIDTH)}


@pytest.mark.parametrize("name", ["chain", "tree, 8 rows", "tree, 16 rows"])
def test_lengths_are_those_of_decoding(script, pair, documents, folder, traces, name):
    """As far as trees were recorded: the answer's end is told from none."""
    beside = SimpleNamespace(
        assembly=SimpleNamespace(engine=SimpleNamespace(model_free=DrafterGroup([default_statistics()])))
    )
    shape = script.TREES.get(name, script.CHAIN)
    lengths = script.played(traces[shape.width], shape, documents, beside)
    shapes = Shapes(
        max_length=200, draft_widths=(shape.width,), max_depth=4, candidates=shape.width, verify_widths=script.WIDTHS,
        prefill_widths=(4, 16),
    )  # fmt: skip
    decoder = pair.decoder(FixedPolicy(shape), shapes, drafter=load_head(folder, pair.target, 1))
    found = [decoder.generate(prompt, max_new_tokens=COUNT - script.DEPTH).metrics for prompt in PROMPTS]
    iterations = sum(metrics.iterations for metrics in found)

    assert lengths["drafter"] == pytest.approx(sum(m.aal * m.iterations for m in found) / iterations)
    if name == "tree, 16 rows":
        assert lengths["drafter"] > 1.1
        assert lengths["drafter and counts"] > lengths["counts"] > 1.2


def test_a_chain_is_one_guess_behind_another(traces):
    """Not the four likeliest nodes: those may all stand below the root."""
    chains = traces[1]
    assert (chains.depth[1] == np.arange(1, 5)).all()
    assert (chains.parent[1] == np.arange(-1, 3)).all()


def test_agreement_is_how_often_the_first_guess_is_the_answer(script, pair, documents, folder, traces, tmp_path):
    """And how often one of four; of the last places of an answer trees tell nothing."""
    pair.plain_target.save_pretrained(tmp_path)
    shares = script.agreement(str(tmp_path), folder, load_head(folder, pair.target, 1).layers, documents)
    untold = len(PROMPTS) * script.DEPTH
    places = traces[1].num_positions + untold

    for (width, of_width), share in zip(traces.items(), shares.values(), strict=True):
        hits = (of_width.accepted_length(width, 1, 1 + width) > 0).sum()
        assert hits > 4
        assert hits <= round(share[0] * places) <= hits + untold


def test_agreement_of_a_head_that_brings_its_embedding_is_by_that_one(
    script, pair, documents, folder, tmp_path, monkeypatch
):
    """Here the target's, and the target has lost it."""
    pair.plain_target.save_pretrained(tmp_path / "target")
    layers = load_head(folder, pair.target, 1).layers
    expected = script.agreement(str(tmp_path / "target"), folder, layers, documents)
    own = pair.plain_target.get_input_embeddings().weight.detach().bfloat16().float()
    config = json.loads((folder / "config.json").read_text())
    brings = write_head(
        tmp_path / "head", config, load_file(folder / "model.safetensors") | {"embed_tokens.weight": own}
    )
    monkeypatch.setattr(script, "target_embedding", lambda _: torch.zeros_like(own))

    assert script.agreement(str(tmp_path / "target"), brings, layers, documents) == expected


def test_agreement_of_a_head_that_drafts_states_is_of_all_tokens(script, pair, documents, tmp_path):
    """Those that the target's own head makes of them; of an answer's last places trees tell nothing."""
    pair.plain_target.save_pretrained(tmp_path / "target")
    config = first_config(VOCAB_SIZE, rms_norm_eps=1e-5)
    tensors = random_tensors(first_shapes(config), scale=0.02)
    tensors["fc.weight"][:, 32:] += torch.eye(32)  # it says again what the target said, which is right in a loop
    folder = write_head(tmp_path / "head", config, tensors)
    shares = script.agreement(str(tmp_path / "target"), folder, (), documents)["agreement"]
    chains = script.record(pair.target, load_head(folder, pair.target, 1), 1, documents, lambda _: None)
    untold = len(PROMPTS) * script.DEPTH
    places, hits = chains.num_positions + untold, (chains.accepted_length(1, 1, 2) > 0).sum()

    assert hits > 4
    assert hits - 2 <= round(shares[0] * places) <= hits + untold + 2, "near ties: this reads the target in bfloat16"
    assert len(shares) == script.SHOWN


def test_a_head_that_drafts_states_is_measured_among_the_frequent_tokens(
    script, pair, documents, tmp_path, monkeypatch
):
    """As a calibration has it decode: what is none of them is missed, in agreement and in trees."""
    monkeypatch.setattr(script, "settled", lambda head, target, fingerprint: head)
    pair.plain_target.save_pretrained(tmp_path / "target")
    target, config = str(tmp_path / "target"), first_config(VOCAB_SIZE, rms_norm_eps=1e-5)
    tensors = random_tensors(first_shapes(config), scale=0.02)
    tensors["fc.weight"][:, 32:] += torch.eye(32)
    folder = write_head(tmp_path / "head", config, tensors)
    answered = [token for _, answer in documents for token in answer]
    missed = max(set(answered), key=answered.count)
    among = Vocabulary(torch.tensor([token for token in range(VOCAB_SIZE) if token != missed]))
    second = script.opened_beside(pair.target, target, folder, among)
    whole, some = (script.agreement(target, folder, (), documents, tokens)["agreement"] for tokens in (None, among))
    trees = script.record(pair.target, second, 1, documents, lambda _: None)

    assert second.settings.draft_vocab_size == VOCAB_SIZE - 1
    assert some[0] < whole[0]
    assert missed not in trees.token[1]
    assert script.opened_beside(pair.target, target, folder).settings.draft_vocab_size == VOCAB_SIZE


@torch.inference_mode()
def test_agreement_of_medusas_heads_is_of_each_from_earlier_states(script, pair, documents, tmp_path):
    """By the formula of the format: head d guesses the token d + 2 places behind the state that it reads."""
    pair.plain_target.save_pretrained(tmp_path / "target")
    tensors = random_tensors(medusa_shapes(32, VOCAB_SIZE), scale=0.1)
    for head in range(3):  # guesses that the target may make, so that some are right
        tensors[f"{head}.1.weight"] = (0, 0.3, -0.3)[head] * tensors[
            f"{head}.1.weight"
        ] + pair.plain_target.lm_head.weight
    folder = write_medusa(tmp_path / "medusa", tensors)
    shares = script.agreement(str(tmp_path / "target"), folder, (), documents)["agreement"]

    target, expected = deepcopy(pair.plain_target).to(torch.bfloat16), []
    for head in range(3):
        said = []
        for prompt, answer in documents:
            text = torch.tensor([*prompt, *answer])
            states = target.model(text[None]).last_hidden_state[0].float()
            guesses = medusa_logits(tensors, states, head).argmax(-1)
            places = torch.arange(len(prompt), len(text))
            said.append(guesses[places - 2 - head] == text[places])
        expected.append(torch.cat(said).float().mean().item())
    assert min(expected) > 0
    assert len(set(expected)) == 3
    assert shares == pytest.approx(expected)


def test_shares_are_of_guesses_behind_those_that_stand(script, traces, monkeypatch):
    monkeypatch.setattr(type(traces[1]), "accepted_length", lambda *_: np.array([0, 0, 1, 2, 2, 4, 4, 4]))
    assert script.standing(traces[1]) == [6 / 8, 5 / 6, 3 / 5, 3 / 3]


def test_a_draft_model_is_measured_like_a_head(script, pair, documents, tmp_path):
    """The target itself: everything that it says stands."""
    pair.plain_target.save_pretrained(tmp_path)
    drafter = script.opened_beside(pair.target, "a target", tmp_path)
    assert script.standing(script.record(pair.target, drafter, 1, documents, lambda _: None)) == [1.0] * script.DEPTH


def test_prompts_are_of_all_parts_of_the_file(script, pair, folder, monkeypatch, tmp_path):
    """Files stand in the order of their categories."""
    asked = [pair.decoder(FixedPolicy(script.CHAIN)).tokenizer.decode(TEXT[i : i + 9]) for i in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    decoder, told = pair.decoder(FixedPolicy(script.TREES["tree, 8 rows"])), []
    monkeypatch.setattr(script.Decoder, "from_pretrained", lambda *_, **__: decoder)
    monkeypatch.setattr(script, "opened_beside", lambda *_: None)
    monkeypatch.setattr(script, "frequent", lambda _: None)
    monkeypatch.setattr(script, "record", lambda *_: None)
    monkeypatch.setattr(script, "standing", lambda _: [0.5])
    monkeypatch.setattr(script, "played", lambda traces, shape, documents, decoder: told.append(documents) or {})
    monkeypatch.setattr(script, "show", lambda *_: None)
    script.measure("target", str(folder), tmp_path / "prompts.jsonl", limit=3, tokens=12, out=tmp_path / "out.json")

    assert len(told) == 3
    assert told[0] == told[1] == told[2]
    told = told[0]
    assert [document.prompt for document in told] == [list(decoder.encode(asked[i])) for i in (0, 2, 4)]
    assert [document.answer for document in told] == [pair.reference(document.prompt, 12) for document in told]
    assert json.loads((tmp_path / "out.json").read_text())["documents"] == 3


@pytest.mark.parametrize("lines", ["", '{"prompt": 1}'], ids=["none", "damaged"])
def test_prompts_are_read_before_the_target_is_calibrated(script, folder, tmp_path, lines):
    (tmp_path / "prompts.jsonl").write_text(lines)
    with pytest.raises(YggdrasilError, match=r"prompts\.jsonl"):
        script.measure("no/such-target", str(folder), tmp_path / "prompts.jsonl")


def test_answers_that_are_too_short_for_a_chain_are_told(script, pair, documents, folder, monkeypatch, tmp_path):
    """There is nothing to measure."""
    end = documents[0].answer[3]
    decoder = pair.decoder(FixedPolicy(script.TREES["tree, 8 rows"]), eos=[end])
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": decoder.tokenizer.decode(PROMPTS[0])}))
    monkeypatch.setattr(script.Decoder, "from_pretrained", lambda *_, **__: decoder)

    with pytest.raises(YggdrasilError, match="no answer has more than 8 tokens; give other --prompts"):
        script.measure("target", str(folder), tmp_path / "prompts.jsonl")


def test_files_are_looked_at_before_any_work(script, tmp_path):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(script.measure)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "text"}')
    for name, value in (("prompts", "none.jsonl"), ("json", ".")):
        given = {"target": "no/such-target", "drafter": "none", "prompts": tmp_path / "prompts.jsonl"}
        given[name] = tmp_path / value
        ended = CliRunner().invoke(app, [part for key, each in given.items() for part in (f"--{key}", str(each))])

        assert isinstance(ended.exception, YggdrasilError)
        assert f"--{name}" in str(ended.exception)
