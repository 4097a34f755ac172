"""EAGLE-1 and Medusa heads load as published, are told from each other, and compute what their formats say."""

import pytest
import torch
from head_files import causal, eagle_config, published_tensors, speculators_config, write_head
from other_heads import (
    HIDDEN,
    FirstReference,
    first_config,
    first_shapes,
    medusa_logits,
    medusa_shapes,
    random_tensors,
    vllm_medusa_shapes,
    write_medusa,
)
from safetensors.torch import save_file
from torch.nn import functional

from yggdrasil.artifacts import model_fingerprint
from yggdrasil.drafters.heads.eagle.config import settings_of
from yggdrasil.drafters.heads.eagle.eagle1 import FirstEagleHead
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.kinds import kind_of
from yggdrasil.drafters.heads.medusa.files import open_medusa
from yggdrasil.drafters.heads.medusa.module import MedusaHeads, MedusaSettings
from yggdrasil.errors import YggdrasilError

VICUNA = {  # the configuration of EAGLE's head for Vicuna 7B
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 1,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
LLAMA_3_1 = {  # EAGLE-3's for Llama 3.1 8B
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "head_dim": 128, "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 1,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "vocab_size": 128256, "draft_vocab_size": 32000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "has_bias"), [({}, True), ({"bias": False}, False), ({"add_para_norm": True, "rope_theta": 5e5}, True)]
)
def test_an_eagle_1_head_computes_what_the_format_says(tmp_path, more, has_bias):
    """Certain rows, then two drafted ones that read their own outputs; the target's head says the tokens."""
    config = first_config(**more)
    tensors = random_tensors(first_shapes(config, has_bias=has_bias))
    torch.manual_seed(0)
    table, output = torch.randn(64, HIDDEN), torch.randn(64, HIDDEN)
    reference = FirstReference(config, tensors, table, output)
    head, own = open_head(write_head(tmp_path, config, tensors), torch.float32)
    assert own is None
    head.lm_head = torch.nn.Linear(HIDDEN, 64, bias=False)
    head.lm_head.weight.data = output
    tokens, states = torch.tensor([3, 9, 60, 1, 8, 2]), torch.randn(4, HIDDEN)
    theirs = ours = states
    for length in (4, 5, 6):
        read, rows = tokens[:length], torch.arange(length)
        wanted, logits = reference.rows(read, theirs, rows, rows[:, None] >= rows)
        found = head(table[read], head.feature(ours), rows, causal)
        torch.testing.assert_close(head.logits(found), logits, rtol=1e-4, atol=1e-4)
        theirs, ours = torch.cat([theirs, wanted[-1:]]), torch.cat([ours, head.fed_back(found[-1:])])


def test_speculators_names_of_an_eagle_1_head(tmp_path):
    config = {"speculators_model_type": "eagle", "transformer_layer_config": first_config(), "fusion_bias": False}
    tensors = random_tensors(first_shapes(first_config(), has_bias=False))
    theirs = {name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): t for name, t in tensors.items()}
    head, _ = open_head(write_head(tmp_path, config, theirs), torch.float32)

    assert {name: tuple(t.shape) for name, t in head.state_dict().items()} == {
        name: tuple(t.shape) for name, t in tensors.items()
    }


def test_the_tensors_of_real_configurations_have_their_names_and_shapes():
    with torch.device("meta"):
        first = FirstEagleHead(settings_of(VICUNA, is_first=True))
        medusa = MedusaHeads(MedusaSettings(5, 1, 4096, 32000, 32000))
    assert shapes_of(first) == first_shapes(VICUNA)
    expected = vllm_medusa_shapes(4096, 32000, num_heads=5, has_bias=True)
    assert shapes_of(medusa) == expected


def test_the_tensors_of_a_real_eagle_3_configuration_have_their_names_and_shapes():
    from yggdrasil.drafters.heads.eagle.eagle3 import EagleHead

    with torch.device("meta"):
        head = EagleHead(settings_of(LLAMA_3_1))
    assert shapes_of(head) == {
        "fc.weight": (4096, 12288), "midlayer.input_layernorm.weight": (4096,),
        "midlayer.hidden_norm.weight": (4096,), "midlayer.self_attn.q_proj.weight": (4096, 8192),
        "midlayer.self_attn.k_proj.weight": (1024, 8192), "midlayer.self_attn.v_proj.weight": (1024, 8192),
        "midlayer.self_attn.o_proj.weight": (4096, 4096), "midlayer.post_attention_layernorm.weight": (4096,),
        "midlayer.mlp.gate_proj.weight": (14336, 4096), "midlayer.mlp.up_proj.weight": (14336, 4096),
        "midlayer.mlp.down_proj.weight": (4096, 14336), "norm.weight": (4096,), "lm_head.weight": (32000, 4096),
        "d2t": (32000,),
    }  # fmt: skip


def shapes_of(module):
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("file", ["pickle", "safetensors", "beside the base model", "vllm"])
def test_medusas_heads_compute_what_the_format_says(tmp_path, file, num_layers):
    """Three heads in the file, whatever the configuration says."""
    tensors = random_tensors(medusa_shapes(HIDDEN, 64, num_layers=num_layers))
    if file == "pickle":
        write_medusa(tmp_path, tensors)
    elif file == "safetensors":
        write_head(tmp_path, {"medusa_num_heads": 5}, {})
        (tmp_path / "model.safetensors").unlink()
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    elif file == "beside the base model":
        base = {"model.embed_tokens.weight": torch.zeros(64, HIDDEN), "lm_head.weight": torch.zeros(64, HIDDEN)}
        write_head(tmp_path, {}, base | {f"medusa_head.{name}": tensor for name, tensor in tensors.items()})
    else:
        renamed = {}
        for name, tensor in tensors.items():
            head, layer, *rest = name.split(".")
            is_output = rest == ["weight"]
            renamed[f"lm_heads.{head}.weight" if is_output else f"blocks.{head}.layers.{layer}.{rest[-1]}"] = tensor
        write_head(tmp_path, {"model_type": "medusa", "medusa_fc_bias": True, "vocab_size": 64}, renamed)
    states = torch.randn(5, HIDDEN)

    assert kind_of(tmp_path) == "medusa"
    logits = open_medusa(tmp_path, torch.float32)(states)

    assert logits.shape == (5, 3, 64)
    for head in range(3):
        torch.testing.assert_close(logits[:, head], medusa_logits(tensors, states, head))
    assert len(model_fingerprint(tmp_path)) == 16


@pytest.mark.parametrize("keeps_all_rows", [False, True])
def test_vllms_heads_draft_some_tokens_through_one_output_layer(tmp_path, keeps_all_rows):
    drafted = torch.tensor([5, 7, 60, 2])
    tensors = random_tensors(vllm_medusa_shapes(HIDDEN, 64 if keeps_all_rows else 4, is_shared=True))
    config = {"model_type": "medusa", "original_lm_head": True, "vocab_size": 64, "truncated_vocab_size": 4}
    heads = open_medusa(write_head(tmp_path, config, tensors | {"token_map": drafted}), torch.float32)
    state = torch.randn(HIDDEN)

    output = tensors["lm_heads.0.weight"][drafted] if keeps_all_rows else tensors["lm_heads.0.weight"]
    block = state + functional.silu(tensors["blocks.2.layers.0.weight"] @ state)
    torch.testing.assert_close(heads(state)[2], output @ block)
    assert torch.equal(heads.target_tokens(torch.arange(4)), drafted)


@pytest.mark.parametrize("spelling", ["a layer of its own", "a copy for every head"])
def test_one_output_layer_of_vllms_heads_may_be_kept_as_vllm_reads_it(tmp_path, spelling):
    tensors = random_tensors(vllm_medusa_shapes(HIDDEN, 64, is_shared=spelling == "a layer of its own"))
    output = tensors["lm_heads.0.weight"]
    if spelling == "a layer of its own":
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    config = {"model_type": "medusa", "original_lm_head": True, "vocab_size": 64, "truncated_vocab_size": 64}
    heads = open_medusa(write_head(tmp_path, config, tensors), torch.float32)
    state = torch.randn(HIDDEN)

    block = state + functional.silu(tensors["blocks.2.layers.0.weight"] @ state)
    torch.testing.assert_close(heads(state)[2], output @ block)


FIRST_FAULTS = {
    "missing": (lambda t: t.pop("layers.0.mlp.up_proj.weight"), "lacks layers.0.mlp.up_proj.weight"),
    "extra": (lambda t: t.update({"norm.weight": torch.zeros(32)}), "beyond what a head has, norm.weight"),
    "misshapen": (lambda t: t.update({"fc.weight": torch.zeros(32, 96)}), r"fc.weight \(\[32, 96\], not \[32, 64\]\)"),
}
MEDUSA_FAULTS = {
    "missing": (lambda t: t.pop("1.1.weight"), "lacks lm_heads.1.weight"),
    "missing, of all": (lambda t: t.pop("0.1.weight"), "lacks lm_heads.0.weight"),
    "extra": (lambda t: t.update({"more": torch.zeros(1)}), "beyond what a head has, more"),
    "a number": (lambda t: t.update({"0.1.weight": torch.tensor(1.0)}), "lm_heads.0.weight is no matrix"),
    "in two spellings": (
        lambda t: t.update({"lm_heads.0.weight": torch.zeros(64, 32)}),
        "0.1.weight and lm_heads.0.weight, which are one",
    ),
    "misshapen": (
        lambda t: t.update({"2.0.linear.bias": torch.zeros(3)}), r"blocks.2.layers.0.bias \(\[3\], not \[32\]\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), [*(("eagle", name) for name in FIRST_FAULTS), *(("medusa", name) for name in MEDUSA_FAULTS)]
)
def test_tensors_that_are_no_heads_are_named(tmp_path, kind, name):
    harm, said = (FIRST_FAULTS if kind == "eagle" else MEDUSA_FAULTS)[name]
    tensors = random_tensors(first_shapes(first_config()) if kind == "eagle" else medusa_shapes(HIDDEN, 64))
    harm(tensors)
    folder = write_head(tmp_path, first_config(), tensors) if kind == "eagle" else write_medusa(tmp_path, tensors)

    with pytest.raises(YggdrasilError, match=said):
        (open_head if kind == "eagle" else open_medusa)(folder, torch.float32)


@pytest.mark.parametrize("rows", [3, 64])
@pytest.mark.parametrize(
    ("drafted", "said"),
    [
        ([5, 5, 6], "names tokens twice"),
        ([5, 64, 6], "outside the target's 64"),
        ([5, -1, 6], "outside the target's 64"),
        ([5, 5.5, 6], "token_map holds other things than tokens"),
        ([], "token_map holds other things than tokens"),
    ],
)
def test_a_map_that_names_no_tokens_is_refused(tmp_path, drafted, said, rows):
    tensors = random_tensors(vllm_medusa_shapes(HIDDEN, rows)) | {"token_map": torch.tensor(drafted)}

    with pytest.raises(YggdrasilError, match=said):
        open_medusa(write_head(tmp_path, {"model_type": "medusa", "vocab_size": 64}, tensors), torch.float32)


@pytest.mark.parametrize(
    ("held", "said"), [(FirstReference, "more than tensors"), ([1.0], "other things than tensors")]
)
def test_a_pickle_of_more_than_tensors_is_refused(tmp_path, held, said):
    write_medusa(tmp_path, {"0.0.linear.weight": held})

    with pytest.raises(YggdrasilError, match=rf"medusa_lm_head\.pt.*{said}"):
        open_medusa(tmp_path, torch.float32)


def test_heads_in_a_file_of_their_own_are_read_from_it_alone(tmp_path):
    """Beside the weights of their model, of which nothing is theirs."""
    tensors = random_tensors(medusa_shapes(HIDDEN, 64))
    write_head(tmp_path, {"model_type": "llama"}, {"model.embed_tokens.weight": torch.zeros(64, HIDDEN)})
    before = model_fingerprint(tmp_path)
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")

    assert open_medusa(tmp_path, torch.float32).settings.num_heads == 3
    assert model_fingerprint(tmp_path) != before


def test_a_file_that_does_not_count_is_not_read(tmp_path):
    """What lies beside a head's weights, as a copy in another precision, is not among what tells that it changed."""
    tensors = random_tensors(first_shapes(first_config()))
    write_head(tmp_path, first_config(), tensors)
    before = model_fingerprint(tmp_path)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "older.safetensors")

    head, _ = open_head(tmp_path, torch.float32)
    assert torch.equal(head.fc.weight, tensors["fc.weight"])
    assert model_fingerprint(tmp_path) == before


def test_nor_does_it_tell_what_kind_of_head_there_is(tmp_path):
    write_head(tmp_path, {"model_type": "llama"}, {"model.norm.weight": torch.zeros(3)})
    save_file({"fc.weight": torch.zeros(3, 6)}, tmp_path / "other.safetensors")

    assert kind_of(tmp_path) is None


def test_a_heads_folder_is_known_by_what_it_holds(tmp_path):
    first = random_tensors(first_shapes(first_config()))
    for name, config, tensors in (
        ("eagle3", eagle_config(), published_tensors(eagle_config())),
        ("eagle3 of speculators", speculators_config(), {}),
        ("eagle", first_config(), first),
        ("eagle of speculators", {"speculators_model_type": "eagle"}, {}),
        ("medusa", {"model_type": "medusa"}, {}),
        ("none, a model", first_config(), {"model.norm.weight": torch.zeros(3)}),
    ):
        kind = kind_of(write_head(tmp_path / name, config, tensors))
        assert kind == (None if name.startswith("none") else name.partition(" ")[0])
    pickled = tmp_path / "eagle" / "pytorch_model.bin"
    (tmp_path / "eagle" / "model.safetensors").unlink()
    torch.save(first, pickled)
    assert kind_of(tmp_path / "eagle") == "eagle"
    before = model_fingerprint(tmp_path / "eagle")
    torch.save({name: tensor + 1 for name, tensor in first.items()}, pickled)
    assert model_fingerprint(tmp_path / "eagle") != before
    assert kind_of(tmp_path / "nothing") is None
