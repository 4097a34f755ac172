"""EAGLE-3 heads load as published, in both spellings, and compute what the format says."""

import json

import pytest
import torch
from head_files import Reference, causal, eagle_config, published_tensors, speculators_config, write_head

from yggdrasil.drafters.heads.eagle.config import read_settings
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.errors import YggdrasilError

CASES = {
    "eagle": (eagle_config(), "midlayer."),
    "eagle, whole vocabulary": (eagle_config(drafted=64), "midlayer."),
    "eagle, another rotary base": (eagle_config(rope_theta=5e5), "midlayer."),
    "speculators": (speculators_config(), "layers.0."),
    "normed queries and keys": (speculators_config(layer={"model_type": "qwen3"}), "layers.0."),
    "norm before residual": (speculators_config(norm_before_residual=True), "layers.0."),
    "norm before fc": (speculators_config(norm_before_fc=True), "layers.0."),
    "a norm a state": (speculators_config(fc_norm=True, norm_output=True), "layers.0."),
}


@pytest.mark.parametrize("name", CASES)
def test_a_published_head_computes_what_the_format_says(tmp_path, name):
    """Certain rows, then two drafted ones that read their own outputs; the twin knows nothing of our code."""
    config, spelling = CASES[name]
    tensors = published_tensors(config, spelling=spelling)
    embedding = torch.randn(64, 32, generator=torch.Generator().manual_seed(5))
    reference = Reference(config, tensors, embedding, spelling=spelling)
    head, own = open_head(write_head(tmp_path, config, tensors), torch.float32)
    assert own is None
    tokens = torch.tensor([3, 9, 60, 1, 8, 2])
    states = torch.randn(4, 96, generator=torch.Generator().manual_seed(6))
    theirs, ours = reference.feature(states), head.feature(states)
    for length in (4, 5, 6):
        read, rows = tokens[:length], torch.arange(length)
        mask = rows[:, None] >= rows
        wanted, logits = reference.rows(read, theirs, rows, mask)
        found = head(embedding[read], ours, rows, causal)
        torch.testing.assert_close(head.logits(found), logits)
        theirs = torch.cat([theirs, reference.next_feature(wanted[-1:])])
        ours = torch.cat([ours, head.fed_back(found[-1:])])
    torch.testing.assert_close(ours, theirs)


def test_drafted_tokens_are_the_targets(tmp_path):
    config = eagle_config()
    tensors = published_tensors(config)
    head, _ = open_head(write_head(tmp_path, config, tensors), torch.float32)

    tokens = head.target_tokens(torch.arange(40))

    assert torch.equal(tokens, tensors["t2d"].nonzero()[:, 0])


def test_a_head_may_bring_an_embedding_and_what_is_not_its_own(tmp_path):
    config = speculators_config()
    tensors = published_tensors(config, spelling="layers.0.")
    table = torch.randn(64, 32)
    more = {"embed_tokens.weight": table, "verifier_lm_head.weight": torch.zeros(40, 32)}

    _, embedding = open_head(write_head(tmp_path, config, tensors | more), torch.float32)

    assert torch.equal(embedding, table)


def test_a_pickle_of_tensors_is_read_and_any_other_is_not(tmp_path):
    config = eagle_config()
    tensors = published_tensors(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    head, _ = open_head(tmp_path, torch.float32)
    assert torch.equal(head.fc.weight, tensors["fc.weight"])

    torch.save({"fc.weight": Reference}, tmp_path / "pytorch_model.bin")
    with pytest.raises(YggdrasilError, match=r"pytorch_model\.bin.*more than tensors"):
        open_head(tmp_path, torch.float32)


FAULTS = {
    "missing": (lambda t: t.pop("midlayer.hidden_norm.weight"), "lacks midlayer.hidden_norm.weight"),
    "extra": (lambda t: t.update({"midlayer.more": torch.zeros(1)}), "beyond what a head has, midlayer.more"),
    "misshapen": (
        lambda t: t.update({"fc.weight": torch.zeros(32, 64)}),
        r"misshapen fc.weight \(\[32, 64\], not \[32, 96\]\)",
    ),
    "one norm of heads": (
        lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
        "lacks midlayer.self_attn.k_norm.weight",
    ),
    "no table": (lambda t: t.pop("d2t"), "lacks d2t"),
    "a table of fractions": (lambda t: t.update({"d2t": t["d2t"] + 0.5}), "d2t holds other things than tokens"),
    "tables that contradict": (lambda t: t.update({"t2d": ~t["t2d"]}), "t2d and d2t name other tokens"),
    "in two spellings": (
        lambda t: t.update({"layers.0.hidden_norm.weight": torch.zeros(32)}),
        "layers.0.hidden_norm.weight and midlayer.hidden_norm.weight, which are one",
    ),
    "a table that points outside": (lambda t: t["d2t"].add_(60), "d2t names tokens"),
    "a table that names twice": (lambda t: t["d2t"].__setitem__(1, -1 + int(t["d2t"][0])), "d2t names tokens"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_are_named(tmp_path, name):
    harm, said = FAULTS[name]
    config = eagle_config()
    tensors = published_tensors(config)
    harm(tensors)

    with pytest.raises(YggdrasilError, match=said):
        open_head(write_head(tmp_path, config, tensors), torch.float32)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"draft_vocab_size": 65}, "more than 64"),
        ({"hidden_act": "swish9"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling lacks 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'original_max_position_embeddings'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not a mapping"),
        ({"rope_theta": "abc"}, "no number: .*abc"),
        ({"rope_theta": [1]}, "no number"),
        ({"rope_theta": -1.0}, "no rotary positions"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differs by layer type"),
        ({"eagle_config": [1]}, r"eagle_config is \[1\], not a mapping"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "3, not a list of layers"),
        ({"layer_convention": "outside"}, "not one of inputs, outputs"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude"),
        ({"layer_types": ["sliding_attention"]}, "lacks 'sliding_window'"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "a"]}, "not a list of layers"),
    ],
)
def test_configurations_that_are_not_served_are_refused_by_name(tmp_path, more, said):
    (tmp_path / "config.json").write_text(json.dumps(eagle_config(**more)))

    with pytest.raises(YggdrasilError, match=said):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("config", "usual", "other"),
    [
        (eagle_config(), (1, 14, 26), (2, 15, 27)),
        (speculators_config(eagle_aux_hidden_state_layer_ids=[2, 15, 27]), (1, 14, 26), (2, 15, 27)),
        (eagle_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}), (1, 14, 26), (0, 13, 25)),
    ],
)
def test_layers_are_read_by_the_writers_convention_first(tmp_path, config, usual, other):
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert read_settings(tmp_path).readings(30) == [usual, other]


@pytest.mark.parametrize(
    ("config", "reading"),
    [
        (eagle_config(layer_convention="inputs"), (1, 14, 26)),
        (eagle_config(layer_convention="outputs", eagle_aux_hidden_state_layer_ids=[1, 14, 26]), (1, 14, 26)),
    ],
)
def test_a_convention_that_is_said_is_not_tried(tmp_path, config, reading):
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert read_settings(tmp_path).readings(30) == [reading]


def test_rotary_positions_may_leave_out_what_they_do_not_change(tmp_path):
    found = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": None}
    (tmp_path / "config.json").write_text(json.dumps(eagle_config(rope_parameters=found)))

    assert read_settings(tmp_path).rope == {"rope_type": "default", "rope_theta": 5e5}


def test_a_window_is_read_where_the_layer_is_said_to_have_one(tmp_path):
    """Many files name their target's, and their writers give the head none."""
    for types, window in ((["sliding_attention"], 512), (["full_attention"], 0), (None, 0)):
        (tmp_path / "config.json").write_text(json.dumps(eagle_config(sliding_window=512, layer_types=types)))
        assert read_settings(tmp_path).window == window
