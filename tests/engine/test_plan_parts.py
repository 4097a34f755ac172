"""A plan's head drafts among the tokens that its calibration chose, which lie beside it; an older plan's among all."""

from dataclasses import replace

import pytest
import torch
from head_cases import COUNT, PROMPT, FirstCase
from made_up import write_artifacts
from tiny_pair import VOCAB_SIZE, byte_tokenizer, make_pair
from watched import watch

from yggdrasil import Decoder
from yggdrasil.artifacts import read_yaml, write_yaml
from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.pair import build_assembly
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.heads.draft_vocabulary import FILE_NAME, Vocabulary
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.scheduling.plan import KIND, SCHEMA_VERSION, ModelRef, Plan

EVERY_OTHER = Vocabulary(torch.arange(1, VOCAB_SIZE, 2))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a head of EAGLE-1 on disk."""
    folder, pair = tmp_path_factory.mktemp("pair"), make_pair(num_hidden_layers=2, hidden_size=32)
    pair.plain_target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    (folder / "head").mkdir()
    FirstCase(pair, folder / "head")
    return pair, folder


@pytest.fixture
def path(pair, tmp_path, monkeypatch):
    """A plan of them."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("yggdrasil.engine.plan_parts.with_detected_layers", lambda head, target, fingerprint: head)
    monkeypatch.setattr("yggdrasil.calibration.pair.with_detected_layers", lambda head, target, fingerprint: head)
    target, head = (Source.find(str(pair[1] / part)) for part in ("target", "head"))
    refs = (ModelRef(str(source.folder), source.fingerprint(), 1) for source in (target, head))
    made = {"target": next(refs), "drafters": [next(refs), StatisticsOptions(table=False)], "depth_from": "mean"}
    made |= {"tokenizer": target.tokenizer_fingerprint(), "draft_vocabulary": len(EVERY_OTHER.tokens)}
    path = write_artifacts(tmp_path, **made)
    EVERY_OTHER.save(path.parent / Plan.load(path).predictor / FILE_NAME)
    return path


def beside(path):
    return path.parent / Plan.load(path).predictor


def test_it_is_read_again_and_the_text_is_the_targets(path, pair):
    decoder = Decoder.from_plan(path, backend="eager")
    seen = watch(decoder)
    result = decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert result.tokens == pair[0].reference(PROMPT, COUNT)
    assert {token for _, guesses in seen for way, _ in guesses for token in way} <= set(EVERY_OTHER.tokens.tolist())
    assert decoder.assembly.second.settings.draft_vocab_size == len(EVERY_OTHER.tokens)


def test_a_search_and_a_profile_build_the_same(path):
    source = PairSource.of_plan(Plan.load(path), beside(path))

    assert torch.equal(source.vocabulary.tokens, EVERY_OTHER.tokens)
    assert build_assembly(source, backend="eager").second.settings.draft_vocab_size == len(EVERY_OTHER.tokens)
    assert source.without_drafter().vocabulary is None


def test_a_plan_of_before_drafts_among_all(path):
    """It says nothing of a vocabulary, whatever lies beside it."""
    content = read_yaml(path, KIND, SCHEMA_VERSION)
    assert content.pop("draft_vocabulary") == len(EVERY_OTHER.tokens)
    write_yaml(path, KIND, SCHEMA_VERSION, content)

    assert Decoder.from_plan(path, backend="eager").assembly.second.settings.draft_vocab_size == VOCAB_SIZE


def test_a_vocabulary_that_is_missing_cut_or_of_another_calibration_is_refused(path):
    file = beside(path) / FILE_NAME
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ArtifactError, match=r"vocabulary\.safetensors is not a whole safetensors file"):
        Decoder.from_plan(path, backend="eager")
    Vocabulary(torch.arange(9)).save(file)
    with pytest.raises(YggdrasilError, match="holds 9 tokens, and the plan made-up drafts among 48; calibrate again"):
        Decoder.from_plan(path, backend="eager")
    file.unlink()
    with pytest.raises(ArtifactError, match=r"there is no file .*vocabulary\.safetensors"):
        Decoder.from_plan(path, backend="eager")


@pytest.mark.parametrize("changes", [{"draft_vocabulary": 0}, {"drafters": [StatisticsOptions()]}])
def test_no_plan_has_one_without_a_drafter_or_tokens(path, changes):
    with pytest.raises(ValueError, match="draft_vocabulary is"):
        replace(Plan.load(path), **changes)
