"""What a head is measured to keep is what the engine keeps with it, and its agreement what its first guesses say."""

import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from head_files import eagle_config, published_tensors, write_head
from tiny_pair import TEXT, VOCAB_SIZE, make_pair

from yggdrasil.calibration.own_text import Document
from yggdrasil.drafters.counts import usual_counts
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.engine.policy import FixedPolicy
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
    return script.record(pair.target, load_head(folder, pair.target, 1), documents, lambda _: None)


def test_lengths_are_those_of_decoding(script, pair, documents, folder, traces):
    """As far as trees were recorded: the answer's end is told from none."""
    beside = SimpleNamespace(assembly=SimpleNamespace(engine=SimpleNamespace(free=usual_counts())))
    lengths = script.played(traces, documents, beside)
    shapes = Shapes(
        max_length=200, draft_widths=(1, 4), max_depth=4, candidates=4, verify_widths=script.WIDTHS,
        prefill_widths=(4, 16),
    )  # fmt: skip

    for name, shape in script.SHAPES.items():
        decoder = pair.decoder(FixedPolicy(shape), shapes, drafter=load_head(folder, pair.target, 1))
        found = [decoder.generate(prompt, max_new_tokens=COUNT - script.DEPTH).metrics for prompt in PROMPTS]
        iterations = sum(metrics.iterations for metrics in found)
        assert lengths[name]["drafter"] == pytest.approx(sum(m.aal * m.iterations for m in found) / iterations), name
    assert lengths["tree, 16 rows"]["drafter"] > 1.1
    assert lengths["tree, 16 rows"]["drafter and counts"] > lengths["tree, 16 rows"]["counts"] > 1.2


def test_agreement_is_how_often_the_first_guess_is_the_answer(script, pair, documents, folder, traces, tmp_path):
    """And how often one of four; of the last places of an answer trees tell nothing."""
    pair.plain_target.save_pretrained(tmp_path)
    shares = script.agreement(str(tmp_path), folder, load_head(folder, pair.target, 1).layers, documents)
    untold = len(PROMPTS) * script.DEPTH
    places = traces.num_positions + untold

    for width, share in zip((1, 4), shares.values(), strict=True):
        hits = (traces.accepted_length(width, 1, 1 + width) > 0).sum()
        assert hits > 4
        assert hits <= round(share[0] * places) <= hits + untold


def test_shares_are_of_guesses_behind_those_that_stand(script, traces, monkeypatch):
    monkeypatch.setattr(type(traces), "accepted_length", lambda *_: np.array([0, 0, 1, 2, 2, 4, 4, 4]))
    assert script.standing(traces) == [6 / 8, 5 / 6, 3 / 5, 3 / 3]


def test_a_draft_model_is_measured_like_a_head(script, pair, documents, tmp_path):
    """The target itself: everything that it says stands."""
    pair.plain_target.save_pretrained(tmp_path)
    drafter = script.opened_beside(pair.target, "a target", tmp_path)
    assert script.standing(script.record(pair.target, drafter, documents, lambda _: None)) == [1.0] * script.DEPTH


def test_prompts_are_of_all_parts_of_the_file(script, pair, folder, monkeypatch, tmp_path):
    """Files stand in the order of their categories."""
    asked = [
        pair.decoder(FixedPolicy(script.SHAPES["chain of four"])).tokenizer.decode(TEXT[i : i + 9]) for i in range(6)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    decoder, told = pair.decoder(FixedPolicy(script.SHAPES["tree, 8 rows"])), []
    monkeypatch.setattr(script.Decoder, "from_pretrained", lambda *_, **__: decoder)
    monkeypatch.setattr(script, "opened_beside", lambda *_: None)
    monkeypatch.setattr(script, "record", lambda *_: None)
    monkeypatch.setattr(script, "standing", lambda _: [0.5])
    monkeypatch.setattr(script, "played", lambda traces, documents, decoder: told.extend(documents) or {})
    monkeypatch.setattr(script, "show", lambda *_: None)
    script.measure("target", str(folder), tmp_path / "prompts.jsonl", limit=3, tokens=12, out=tmp_path / "out.json")

    assert [document.prompt for document in told] == [list(decoder.encode(asked[i])) for i in (0, 2, 4)]
    assert [document.answer for document in told] == [pair.reference(document.prompt, 12) for document in told]
    assert json.loads((tmp_path / "out.json").read_text())["documents"] == 3
