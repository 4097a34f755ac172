"""A head that is padded with its target drafts the same, and nothing else is padded."""

import json

import pytest
import torch
import typer
import widen_head as widen_head_script
from head_files import SIZES, eagle_config, published_tensors, write_head
from other_heads import random_tensors, vllm_medusa_shapes
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner
from widening import read_shape, resolve_shape, widen_checkpoint
from widening.heads import widen_head

from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.medusa.files import open_medusa
from yggdrasil.drafters.heads.tensors import read_tensors
from yggdrasil.errors import YggdrasilError
from yggdrasil.training.unroll import Batch, unroll

VOCAB, LAYERS = 64, 6
WIDER = {
    "no wider": {"num_layers": 7},
    "wider": {"hidden_size": 96, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 80},
    "larger heads": {"hidden_size": 64, "head_dim": 16, "num_layers": 12},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"num_hidden_layers": LAYERS}, vocab_size=VOCAB, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def wide_target(target, tmp_path, dimensions):
    widen_checkpoint(target, tmp_path / "wide", resolve_shape(read_shape(target), None, dimensions))
    return tmp_path / "wide"


@pytest.mark.parametrize("dimensions", WIDER.values(), ids=WIDER)
@pytest.mark.parametrize("drafted", [40, VOCAB])
def test_a_padded_head_drafts_the_same(tmp_path, target, dimensions, drafted):
    """Over three steps on its own outputs, from states and embeddings that are padded with zeros."""
    config = eagle_config(vocab=VOCAB, drafted=drafted)
    tensors = {name: each.bfloat16() if each.is_floating_point() else each
               for name, each in published_tensors(config).items()}  # fmt: skip
    wide = wide_target(target, tmp_path, dimensions)
    narrow_folder = write_head(tmp_path / "narrow", config, tensors)
    count = widen_head(narrow_folder, wide, tmp_path / "head")

    narrow, _ = open_head(narrow_folder, torch.float32)
    padded, _ = open_head(tmp_path / "head", torch.float32)
    hidden = read_shape(wide).hidden_size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=generator)
    states, embedding = torch.randn(2, 9, 3, 32, generator=generator), torch.randn(VOCAB, 32, generator=generator)
    learned = torch.zeros(2, 9, dtype=torch.bool).index_fill(1, torch.arange(3, 8), True)
    pad = torch.nn.functional.pad
    before = Batch(tokens, states.flatten(2), torch.zeros(2, 9, 0), learned)
    after = before._replace(states=pad(states, (0, hidden - 32)).flatten(2))
    steps = zip(unroll(narrow, embedding, before, 3), unroll(padded, pad(embedding, (0, hidden - 32)), after, 3),
                strict=True)  # fmt: skip
    for ours, theirs in steps:
        torch.testing.assert_close(theirs.logits, ours.logits, rtol=1e-3, atol=1e-4)
    assert torch.equal(padded.target_tokens(torch.arange(drafted)), narrow.target_tokens(torch.arange(drafted)))
    assert padded.settings.norm_eps == pytest.approx(narrow.settings.norm_eps * 32 / hidden)
    if drafted < VOCAB:
        assert torch.equal(read_tensors(tmp_path / "head")["t2d"], tensors["t2d"])
    assert count == sum(each.numel() for each in padded.parameters())
    assert not (padded.fc.weight == 0).all(dim=0).any()  # no kernel finds a channel to skip
    first_copies = [layer * read_shape(wide).num_layers // LAYERS for layer in (2, 3, 3)]
    assert padded.settings.layers == tuple(first_copies)
    assert padded.settings.convention == "inputs"


@pytest.mark.parametrize("drafted", [None, [3, 60, 7, 9]], ids=["all", "some"])
def test_padded_medusa_heads_draft_the_same(tmp_path, target, drafted):
    rows = VOCAB if drafted is None else len(drafted)
    tensors = {name: each.bfloat16() for name, each in random_tensors(vllm_medusa_shapes(32, rows)).items()}
    tensors |= {} if drafted is None else {"token_map": torch.tensor(drafted)}
    config = {"model_type": "medusa", "vocab_size": VOCAB, "hidden_size": 32}
    wide = wide_target(target, tmp_path, WIDER["wider"])
    widen_head(write_head(tmp_path / "narrow", config, tensors), wide, tmp_path / "head")

    narrow, padded = (open_medusa(tmp_path / name, torch.float32) for name in ("narrow", "head"))
    states = torch.randn(5, 32)

    wide_states = torch.nn.functional.pad(states, (0, padded.settings.hidden_size - 32))
    torch.testing.assert_close(padded(wide_states), narrow(states))
    assert torch.equal(padded.target_tokens(torch.arange(rows)), narrow.target_tokens(torch.arange(rows)))
    assert padded.settings.hidden_size == read_shape(wide).hidden_size == 96
    assert not (padded.blocks[0].layers[0].weight == 0).all(dim=0).any()  # no kernel finds a channel to skip


def test_what_does_not_belong_together_is_refused(tmp_path, target):
    wide = wide_target(target, tmp_path, WIDER["wider"])
    config = eagle_config(vocab=VOCAB)
    head = write_head(tmp_path / "head", config, published_tensors(config))
    with pytest.raises(YggdrasilError, match="was not written by scripts/widen"):
        widen_head(head, target, tmp_path / "out")
    with pytest.raises(YggdrasilError, match="is not an empty folder"):
        widen_head(head, wide, head)
    other = eagle_config(vocab=VOCAB + 8)
    with pytest.raises(YggdrasilError, match="reads states of 32 channels and 72 tokens"):
        widen_head(write_head(tmp_path / "other", other, published_tensors(other)), wide, tmp_path / "out")
    normed = eagle_config(vocab=VOCAB, norm_before_fc=True)
    with pytest.raises(YggdrasilError, match="is no EAGLE-3 or Medusa head as EAGLE"):
        widen_head(write_head(tmp_path / "normed", normed, published_tensors(normed)), wide, tmp_path / "out")
    large = eagle_config(vocab=VOCAB, intermediate_size=200)
    with pytest.raises(YggdrasilError, match="the head is larger than the wide target"):
        widen_head(write_head(tmp_path / "large", large, published_tensors(large)), wide, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, target):
    app = typer.Typer()
    app.command()(widen_head_script.main)
    wide, config = wide_target(target, tmp_path, WIDER["wider"]), eagle_config(vocab=VOCAB)
    head = write_head(tmp_path / "narrow", config, published_tensors(config))
    arguments = ["--head", str(head), "--target", str(wide), "--out", str(tmp_path / "head")]

    done = CliRunner().invoke(app, arguments)
    again = CliRunner().invoke(app, arguments)

    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "head" / "config.json").read_text())["hidden_size"] == 96
    assert again.exit_code == 2
    assert "is not an empty folder; give another" in again.stderr
