"""Block heads (DFlash) load as published, in two spellings, and what is no such head is refused by name."""

import json

import pytest
import torch
from block_files import (
    QWEN3_4B,
    block_config,
    block_shapes,
    block_tensors,
    dflash2_config,
    dspark_config,
    jetspec_config,
    speculators_block_config,
)
from head_files import write_head
from tiny_pair import make_pair

from yggdrasil.calibration.pair import _check_head
from yggdrasil.drafters.heads.block.config import block_settings_of
from yggdrasil.drafters.heads.block.module import BlockHead
from yggdrasil.drafters.heads.files import open_block
from yggdrasil.drafters.heads.kinds import is_head, kind_of
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.errors import YggdrasilError

VOCAB = 64
CONFIG = block_config(VOCAB)


def test_the_tensors_of_a_published_configuration_have_their_names_and_shapes():
    with torch.device("meta"):
        head = BlockHead(block_settings_of(QWEN3_4B))
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}

    assert shapes == block_shapes(QWEN3_4B)
    assert shapes["fc.weight"] == (2560, 5 * 2560)
    assert shapes["layers.4.self_attn.k_norm.weight"] == (128,)
    assert len(shapes) == 3 + 5 * 11


def test_a_published_configuration_is_read():
    settings = block_settings_of(QWEN3_4B)

    assert (settings.block_size, settings.num_guesses, settings.mask_token) == (16, 15, 151669)
    assert settings.readings(36) == [(1, 9, 17, 25, 33)]
    assert settings.views == ((0, False),) * 5
    assert settings.rope["rope_theta"] == 1000000


def test_both_spellings_mean_the_same_layers():
    """Speculators' converter adds one to what z-lab writes: there a layer is counted by its input."""
    ours = block_settings_of(block_config(VOCAB, layers=(1, 3)))
    theirs = block_settings_of(speculators_block_config(VOCAB, 20, layers=(2, 4)))

    assert ours.readings(6) == theirs.readings(6) == [(1, 3)]


@pytest.mark.parametrize("place", ["top", "section"])
def test_sizes_of_a_block_are_read_in_either_place(place):
    """Early files have the size at the top, later ones in the section."""
    config = block_config(VOCAB, 16)
    section = config["dflash_config"]
    if place == "section":
        section["block_size"] = config.pop("block_size")
    else:
        config["mask_token_id"] = section.pop("mask_token_id")
    settings = block_settings_of(config)

    assert (settings.block_size, settings.mask_token) == (16, VOCAB - 1)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CONFIG, (1, 15, None, 0)),
        (jetspec_config(VOCAB), (1, 4, None, 0)),
        (dflash2_config(VOCAB), (1, 4, "selector", 16)),
        (dspark_config(VOCAB, "gated"), (0, 4, "gated", 128)),
        (dspark_config(VOCAB, "vanilla", markov_rank=0), (0, 4, None, 0)),
        (speculators_block_config(VOCAB, 20, speculators_model_type="dspark", markov_rank=6), (0, 4, "vanilla", 128)),
        (speculators_block_config(VOCAB, 20, sample_from_anchor=True), (0, 4, None, 0)),
    ],
)
def test_relatives_say_which_rows_predict_and_what_ranks_candidates_again(config, said):
    settings = block_settings_of(config)

    assert (settings.first_row, settings.num_guesses, settings.successors, settings.num_successors) == said


def test_codebooks_load_in_both_spellings_and_a_confidence_head_is_left_out(tmp_path):
    """As parameters and as embeddings; acceptance is measured and not read from a head."""
    config, dspark = dflash2_config(VOCAB), dspark_config(VOCAB, "rnn")
    tensors = block_tensors(config)
    for number, ending in enumerate(("", ".weight")):
        spelt = {name + ending * name.endswith("codebook"): tensor for name, tensor in tensors.items()}
        (tmp_path / str(number)).mkdir()
        head, _ = open_block(write_head(tmp_path / str(number), config, spelt), torch.float32)
        assert torch.equal(head.successors.previous, tensors["candidate_selector.predecessor_codebook"])
    assert "confidence_head.proj.bias" in block_tensors(dspark)
    head, _ = open_block(write_head(tmp_path, dspark, block_tensors(dspark)), torch.float32)
    assert torch.equal(head.successors.following, block_tensors(dspark)["markov_head.markov_w2.weight"])


def test_scaled_embeddings_and_capped_logits_are_as_said(tmp_path):
    said = {"input_embedding_scale": 2.0, "output_multiplier": 3.0, "final_logit_softcapping": 0.5}
    tensors = block_tensors(CONFIG) | {"lm_head.weight": torch.randn(VOCAB, 32)}
    plain, scaled = (
        open_block(write_head(tmp_path, {**CONFIG, "dflash_config": {**SECTION, **more}}, tensors), torch.float32)[0]
        for more in ({}, said)
    )
    x = torch.randn(4, 32)
    outputs = [head(x * size, torch.arange(4), lambda _: _itself) for head, size in ((plain, 2.0), (scaled, 1.0))]

    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(scaled.logits(x), 0.5 * torch.tanh(plain.logits(x) * 6))


def _itself(query, key, value):
    return value.repeat_interleave(2, dim=0).transpose(0, 1)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}


@pytest.mark.parametrize(
    ("config", "views"),
    [
        (block_config(VOCAB, 5, **SLIDING), ((7, True), (0, False))),
        (block_config(VOCAB, 5, dflash={"causal": False}, **SLIDING), ((11, False), (0, False))),
        (block_config(VOCAB, 5, dflash={"causal": True}), ((0, True), (0, True))),
        (block_config(VOCAB, 5, is_causal=False, **SLIDING), ((11, False), (0, False))),
        (block_config(VOCAB, 5, dflash={"use_swa": True, "swa_window_size": 9}), ((9, True), (9, True))),
        (block_config(VOCAB, 5, sliding_window=7), ((0, False), (0, False))),
        (speculators_block_config(VOCAB, 20, 5, layer=SLIDING), ((7, True), (0, False))),
        (
            speculators_block_config(VOCAB, 20, 5, layer=SLIDING, sliding_window_non_causal=True),
            ((11, False), (0, False)),
        ),
    ],
)
def test_what_rows_see_is_as_said(config, views):
    assert block_settings_of(config).views == views


@pytest.mark.parametrize("config", [CONFIG, speculators_block_config(VOCAB, 20)], ids=["z-lab", "speculators"])
def test_a_folder_is_known_by_its_configuration(tmp_path, config):
    folder = write_head(
        tmp_path, config, block_tensors(config) | ({"d2t": torch.zeros(20)} if "draft_vocab_size" in config else {})
    )

    assert kind_of(folder) == "dflash"
    assert is_head(str(folder))
    _check_head(folder)


def test_an_embedding_and_an_output_layer_of_its_own_are_used(tmp_path):
    own = {"embed_tokens.weight": torch.randn(VOCAB, 32), "lm_head.weight": torch.randn(VOCAB, 32)}
    head, embedding = open_block(write_head(tmp_path, CONFIG, block_tensors(CONFIG) | own), torch.float32)

    torch.testing.assert_close(embedding, own["embed_tokens.weight"])
    torch.testing.assert_close(head.lm_head.weight, own["lm_head.weight"])


FAULTS = {
    "missing": (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "lacks layers.1.self_attn.k_norm.weight"),
    "no hidden norm": (lambda t: t.pop("hidden_norm.weight"), "lacks hidden_norm.weight"),
    "a layer more": (
        lambda t: t.update({"layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}),
        "holds, beyond what a head has, layers.2.mlp.up_proj.weight",
    ),
    "a relative's": (lambda t: t.update({"markov_w1.weight": torch.zeros(4, 4)}), "has, markov_w1.weight"),
    "misshapen": (lambda t: t.update({"fc.weight": torch.zeros(32, 64)}), r"fc.weight \(\[32, 64\], not \[32, 96\]\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_are_no_block_heads_are_named(tmp_path, name):
    harm, said = FAULTS[name]
    tensors = block_tensors(CONFIG)
    harm(tensors)

    with pytest.raises(YggdrasilError, match=said):
        open_block(write_head(tmp_path, CONFIG, tensors), torch.float32)


def changed(**more):
    return {**CONFIG, **more}


SECTION = CONFIG["dflash_config"]
UNSERVED = {
    "no layers": (changed(dflash_config={"mask_token_id": 1}), "it lacks 'target_layer_ids'"),
    "no mask": (changed(dflash_config={"target_layer_ids": [1]}), "it lacks 'mask_token_id'"),
    "no size": ({name: value for name, value in CONFIG.items() if name != "block_size"}, "it lacks 'block_size'"),
    "a block of one": (changed(block_size=1), "block_size is 1, not a number from 2 on"),
    "a mask that there is not": (changed(dflash_config={**SECTION, "mask_token_id": VOCAB}), "there are 64 tokens"),
    "layers that are none": (changed(dflash_config={**SECTION, "target_layer_ids": ["1"]}), "not a list of layers"),
    "no number of layers": (changed(num_hidden_layers=0), "num_hidden_layers is 0"),
    "layer types": (changed(layer_types=["full_attention"]), "layer_types names 1 layers, and there are 2"),
    "a window of no size": (changed(layer_types=["sliding_attention"] * 2), "sliding_window is None"),
    "yarn": (changed(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "'yarn' are not served"),
    "domino": (speculators_block_config(VOCAB, 64, projector_type="domino"), "projector_type is 'domino'"),
    "a Markov head of another kind": (dspark_config(VOCAB, "transformer"), "markov_head_type is 'transformer'"),
    "groups": (changed(conv_kernel_size=2, conv_group_size=5), r"conv_group_size \(5\) does not divide"),
    "no section": (changed(dflash_config=3), "dflash_config is 3, not a mapping"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSERVED)
def test_configurations_that_are_not_served_say_why(tmp_path, name):
    """Before any model is loaded."""
    config, said = UNSERVED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert kind_of(tmp_path) == "dflash"
    with pytest.raises(YggdrasilError, match=f"not a block head that is served: .*{said}"):
        _check_head(tmp_path)


def test_a_mask_of_a_heads_own_is_refused(tmp_path):
    write_head(tmp_path, CONFIG, block_tensors(CONFIG))
    torch.save(torch.zeros(32), tmp_path / "mask_embedding.pt")

    with pytest.raises(YggdrasilError, match=r"brings mask_embedding\.pt"):
        open_block(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (block_config(96, target_layers=36), "is a head for 36 layers, and tiny target has 6"),
        (block_config(96, layers=(0, 6), target_layers=None), "reads layer 6 of its target, and tiny target has 6"),
        (block_config(64), "is a head for a vocabulary of 64, and tiny target has 96"),
        (block_config(96, hidden_size=48), "is a head for a hidden size of 48, and tiny target has 32"),
    ],
)
def test_a_head_of_another_target_is_refused(tmp_path, config, said):
    target = make_pair(num_hidden_layers=6, hidden_size=32).target

    with pytest.raises(YggdrasilError, match=said):
        load_head(write_head(tmp_path, config, block_tensors(config)), target, 1)
