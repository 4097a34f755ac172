"""A target's own MTP module is read from its files; test_drafting.py checks what it drafts."""

import json
import re

import gguf
import pytest
import torch
from gguf_files import finish
from head_cases import COUNT, PROMPT, MtpCase
from mtp_models import (
    FAMILIES,
    HIDDEN,
    LAYERS,
    PROJECTIONS,
    Sizes,
    module_shapes,
    random_module,
    tiny_target,
    write_target,
)
from safetensors.torch import load_file, save_file
from tiny_pair import VOCAB_SIZE

from yggdrasil.calibration.pair import default_max_length
from yggdrasil.drafters.heads.kinds import kind_of, module_note
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.heads.mtp import files as mtp_files
from yggdrasil.drafters.heads.mtp.files import open_mtp
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loading import load_model

IN_GGUF = {
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
}  # llama.cpp's names of architectures
# llama.cpp's names of a module's tensors, in the layer behind the target's own.
NAMES_IN_GGUF = {
    "mtp.fc": "nextn.eh_proj", "mtp.pre_fc_norm_embedding": "nextn.enorm", "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return MtpCase(tmp_path_factory.mktemp("target"), request.param)


def test_the_target_decodes_without_its_module(case):
    """Its tensors are no fault of the target's, and its context stays its own."""
    decoder = case.decoder(drafter=None)

    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == case.pair.reference(PROMPT, COUNT)
    assert default_max_length(str(case.folder), str(case.folder)) == 256


def test_a_target_without_a_module_is_no_head(case, tmp_path):
    assert kind_of(case.folder) == "mtp"
    (tmp_path / "config.json").write_bytes((case.folder / "config.json").read_bytes())
    tensors = load_file(case.folder / "model.safetensors")
    others = {name: tensor for name, tensor in tensors.items() if name not in PROJECTIONS.values()}
    save_file(others, tmp_path / "model.safetensors")

    assert kind_of(tmp_path) is None


FAULTS = {
    "missing": ("mimo", lambda t: t.pop("model.mtp_layers.0.mlp.up_proj.weight"), "lacks block.mlp.up_proj.weight"),
    "an expert missing": (
        "glm4_moe",
        lambda t: t.pop("model.layers.2.mlp.experts.3.down_proj.weight"),
        r"block.mlp.experts.down_proj \(\[3,",
    ),
    "extra": ("ernie4_5_moe", lambda t: t.update({"model.mtp_block.0.more": torch.zeros(1)}), "has, block.more"),
    "misshapen": (
        "mimo",
        lambda t: t.update({"model.mtp_layers.0.input_proj.weight": torch.zeros(HIDDEN, HIDDEN)}),
        r"projection.weight \(\[32, 32\], not \[32, 64\]\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_are_no_modules_are_named(tmp_path, name):
    family, harm, said = FAULTS[name]
    module = random_module(family)
    harm(module)
    write_target(tmp_path, family, tiny_target(family), module)
    target = load_model(str(tmp_path), torch.float32, torch.device("cpu"), 1)

    with pytest.raises(YggdrasilError, match=said):
        load_head(tmp_path, target, 1)


def test_the_modules_layer_is_the_targets_own_kind(case):
    """No copy of the target's large tensors: embedding and output layer are shared with it."""
    head, own = case.head.loaded, {tensor.data_ptr() for tensor in case.pair.target.tensors.values()}
    large = [name for name, tensor in head.tensors.items() if VOCAB_SIZE in tensor.shape]

    assert large
    assert all(head.tensors[name].data_ptr() in own for name in large)


# MiMo-7B, GLM-4.5, ERNIE-4.5-21B-A3B, Qwen3.5-0.8B and Qwen3-Next-80B-A3B.
REAL = {
    "mimo": (Sizes(4096, 11008, 32, 8, 128, 36, vocab=151680), {"rope_theta": 640000.0}),
    "glm4_moe": (
        Sizes(5120, 12288, 96, 8, 128, 92, 160, 1536, 151552),
        {
            "head_dim": 128, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 160,
            "first_k_dense_replace": 3, "moe_intermediate_size": 1536,
        },
    ),
    "ernie4_5_moe": (Sizes(2560, 12288, 20, 4, 128, 28, vocab=103424), {}),
    "qwen3_5_text": (Sizes(1024, 3584, 8, 2, 256, 24, vocab=248320), {"head_dim": 256}),
    "qwen3_next": (
        Sizes(2048, 5120, 16, 2, 256, 48, 512, 512, 151936),
        {"head_dim": 256, "num_experts": 512, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", REAL)
def test_a_published_models_tensors_are_those_of_its_module(family, tmp_path, monkeypatch):
    """By name and shape, without their memory."""
    sizes, more = REAL[family]
    config = {
        "model_type": family, "hidden_size": sizes.hidden, "intermediate_size": sizes.inner, "vocab_size": sizes.vocab,
        "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.key_heads,
        "num_nextn_predict_layers": 1, **more,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    published = {name: torch.empty(shape, device="meta") for name, shape in module_shapes(family, sizes).items()}
    if family == "ernie4_5_moe":
        published["model.norm.weight"] = torch.empty(sizes.hidden, device="meta")
    monkeypatch.setattr(mtp_files, "read_tensors", lambda folder, prefixes: dict(published))

    head = open_mtp(tmp_path, torch.bfloat16)
    assert head.settings.key_heads == sizes.key_heads
    for name, tensor in head.state_dict().items():
        assert tensor.dtype == (torch.float32 if name.endswith("correction_bias") else torch.bfloat16), name
    if family == "qwen3_5_text":  # as a part of a multimodal configuration
        whole = {"model_type": "qwen3_5", "text_config": config}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        assert open_mtp(tmp_path, torch.bfloat16).settings.key_heads == sizes.key_heads


@pytest.mark.parametrize("family", IN_GGUF)
def test_a_gguf_file_gives_the_module_of_its_folder(family, tmp_path, monkeypatch):
    """llama.cpp's converter adds one to the weights of norms, and stores the experts of a layer together."""
    model, module = tiny_target(family), random_module(family, scale=1.0)
    folder = write_target(tmp_path / "target", family, model, module)
    path = write_module(tmp_path / "target.gguf", IN_GGUF[family], module)
    config = mtp_files.load_config(folder)
    expected = open_mtp(folder, torch.float32).state_dict()
    monkeypatch.setattr(mtp_files, "load_config", lambda _: config)

    found = open_mtp(path, torch.float32).state_dict()

    assert kind_of(path) == kind_of(folder) == "mtp"
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def write_module(path, architecture, module):
    """A GGUF file with the tensors of a module of Qwen alone, as llama.cpp's converter writes them."""
    writer, experts = gguf.GGUFWriter(path, architecture), {}
    for name, tensor in module.items():
        stem = name.removesuffix(".weight").removeprefix("mtp.layers.0.")
        if found := re.fullmatch(r"mlp\.experts\.\d+\.(\w+)_proj", stem):
            experts.setdefault(f"ffn_{found[1]}_exps", []).append(tensor)
            continue
        theirs = NAMES_IN_GGUF[stem]
        writer.add_tensor(f"blk.{LAYERS}.{theirs}.weight", (tensor + theirs.endswith("norm")).squeeze().numpy())
    for theirs, tensors in experts.items():
        writer.add_tensor(f"blk.{LAYERS}.{theirs}.weight", torch.stack(tensors).numpy())
    finish(writer)
    return path


def test_a_module_that_is_not_used_is_said(tmp_path):
    module = random_module("qwen3_5_text")
    served, other, without = (tmp_path / f"{name}.gguf" for name in ("served", "other", "without"))
    write_module(served, "qwen35", module)
    write_module(other, "nemotron_h_moe", module)
    write_module(without, "qwen35", {name: each for name, each in module.items() if name != "mtp.fc.weight"})

    assert f"`--drafter {served}` drafts with it" in module_note(served)
    assert "modules of nemotron_h_moe in GGUF files are not supported" in module_note(other)
    assert module_note(without) is None
