"""GGUF files of hybrid models, written as llama.cpp's converter writes them, give the model that was written."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import add_tokenizer, finish, new_writer
from recurrent_models import recurrent_config, recurrent_model
from transformers import AutoModelForCausalLM

from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loading import load_model
from yggdrasil.runtime.native_steps.loading import load_described
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.runtime.selfcheck import check_tree_attention

CPU = torch.device("cpu")
TOKENS = torch.randint(1, 90, (1, 24), generator=torch.Generator().manual_seed(1))
ARCHITECTURES = {
    "lfm2": "LFM2", "qwen3_5": "QWEN35", "qwen3_5_moe": "QWEN35MOE", "granite": "GRANITE_HYBRID",
    "granite_dense": "GRANITE_HYBRID", "lfm2_moe": "LFM2MOE", "falcon_h1": "FALCON_H1",
    "qwen3_next": "QWEN3NEXT", "nemotron_dense": "NEMOTRON_H", "nemotron_h": "NEMOTRON_H_MOE",
    "nemotron_latent": "NEMOTRON_H_MOE",
}  # fmt: skip
# Parts of a file that are one weight of the model, by what its name ends with.
JOINED = {
    "experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "experts.down_proj": ("ffn_down_exps",),
    "experts.up_proj": ("ffn_up_exps",),
    "shared_mlp.input_linear.weight": ("ffn_gate_shexp", "ffn_up_shexp"), "router.weight": ("ffn_gate_inp",),
}  # fmt: skip
families = pytest.mark.parametrize("family", ARCHITECTURES)


def facts_of(config, family):
    facts = {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 0),
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
    }  # fmt: skip
    if family.startswith("nemotron"):
        return facts | nemotron_facts(config, has_experts=family != "nemotron_dense")
    facts["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    if family.startswith("lfm2"):
        heads = [config.num_key_value_heads if kind != "conv" else 0 for kind in config.layer_types]
        return facts | {
            "attention.head_count_kv": heads, "attention.layer_norm_rms_epsilon": config.norm_eps,
            "shortconv.l_cache": config.conv_L_cache,
        } | (expert_facts(config, config.moe_intermediate_size) if family == "lfm2_moe" else {})  # fmt: skip
    if family == "falcon_h1":
        return facts | mamba_facts(config) | {
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.key_length": config.head_dim,
        }  # fmt: skip
    if family in ("granite", "granite_dense"):
        facts |= expert_facts(config, shared=config.shared_intermediate_size) if config.num_local_experts else {}
        return facts | {
            "attention.head_count_kv": [
                config.num_key_value_heads if kind != "linear_attention" else 0 for kind in config.layer_types
            ],
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier, "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling, "rope.scaling.finetuned": False, **mamba_facts(config),
        }  # fmt: skip
    if family in ("qwen3_5_moe", "qwen3_next"):
        facts |= expert_facts(config, config.moe_intermediate_size, config.shared_expert_intermediate_size)
    return facts | {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim // 4,
        "rope.dimension_sections": [11, 11, 10, 0], "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads, "full_attention_interval": 4,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
    }  # fmt: skip


def nemotron_facts(config, has_experts):
    """Every layer has one part: attention has key heads, an MLP or a mixture a size, and a state neither."""
    kinds, inner = config.layers_block_type, config.moe_intermediate_size if has_experts else config.intermediate_size
    facts = {
        "attention.head_count_kv": [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": [inner if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.layer_norm_epsilon": config.layer_norm_epsilon, "attention.key_length": config.head_dim,
        "ssm.conv_kernel": config.conv_kernel, "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups, "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }  # fmt: skip
    if has_experts:
        facts |= expert_facts(config, inner, config.moe_shared_expert_intermediate_size) | {
            "expert_weights_norm": config.norm_topk_prob, "expert_weights_scale": config.routed_scaling_factor,
            "expert_group_count": config.n_group,
        }  # fmt: skip
    return facts | ({"moe_latent_size": config.moe_latent_size} if config.moe_latent_size else {})


def mamba_facts(config):
    return {
        "ssm.conv_kernel": config.mamba_d_conv, "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups, "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
    }  # fmt: skip


def expert_facts(config, inner=0, shared=0):
    """Of an architecture's experts; those of Granite are as wide as its feed-forward length."""
    facts = {
        "expert_count": getattr(config, "num_experts", None) or config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok, "expert_shared_feed_forward_length": shared,
        "leading_dense_block_count": getattr(config, "num_dense_layers", 0),
    }  # fmt: skip
    return facts | ({"expert_feed_forward_length": inner} if inner else {})


def plain_model(family):
    """The model that is written: Granite's dense hybrids have no experts."""
    if family != "granite_dense":
        return recurrent_model(family).plain
    torch.manual_seed(3)
    config = recurrent_config("granite")
    config.num_local_experts = 0
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def in_turns(config, rows, size):
    """Rows of the heads of values, the first of every head of keys first."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    return rows.reshape(keys, heads // keys, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def as_written(config, name, values):
    if ("conv.conv" in name or "conv1d" in name) and values.ndim == 3:
        values = values[:, 0]
    if "mamba" in name or "mixer" in name:
        groups = {"A_log": -np.exp(values)[:, None], "D": values[:, None]} if values.ndim == 1 else {}
        is_norm = name.endswith("norm.weight")
        return (
            values.reshape(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
            if is_norm
            else groups.get(name.rpartition(".")[2], values)
        )
    if "linear_attn" not in name:
        return values + 1 if name.endswith("norm.weight") and config.model_type.startswith("qwen") else values
    if config.model_type == "qwen3_next":
        return -np.exp(values) if name.endswith("A_log") else values
    size, first = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if "conv1d" in name or "in_proj_qkv" in name:
        return np.concatenate([values[:first], in_turns(config, values[first:], size)])
    if "in_proj_z" in name:
        return in_turns(config, values, size)
    if "out_proj" in name:
        return in_turns(config, values.T, size).T
    if name.endswith("A_log"):
        return in_turns(config, -np.exp(values), 1)
    return values if name.endswith("norm.weight") else in_turns(config, values, 1)


def written(table, config, name, tensor):
    """The tensors of a file that are the model's ``name``, as the converter has them."""
    parts = next((parts for end, parts in JOINED.items() if name.endswith(end)), ())
    if "shared_mlp" in name and not config.num_local_experts:
        parts = ("ffn_gate", "ffn_up") if "input" in name else ("ffn_down",)
    if parts:
        values = tensor.chunk(len(parts), 1 if tensor.ndim == 3 else 0)
        layer = name.split(".")[2]
        return [
            (f"blk.{layer}.{part}.weight", each.contiguous().numpy()) for part, each in zip(parts, values, strict=True)
        ]
    if name.endswith("in_proj_qkvz.weight"):
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        group = config.linear_num_value_heads // config.linear_num_key_heads * values
        heads = tensor.unflatten(0, (config.linear_num_key_heads, -1)).split([keys, keys, group, group], 1)
        parts, layer = [head.flatten(0, 1) for head in heads], name.split(".")[2]
        return [
            (f"blk.{layer}.attn_qkv.weight", torch.cat(parts[:3]).numpy()),
            (f"blk.{layer}.attn_gate.weight", parts[3].numpy()),
        ]
    if config.model_type == "nemotron_h":
        as_there = name.replace("model.", "backbone.", 1).replace("dt_bias", "dt_proj.bias")
        as_there = as_there.replace("e_score_correction_bias", "e_score_correction.bias")
        theirs = table.get_name(as_there) or table.get_name(as_there, (".weight", ".bias"))
        return [(theirs, np.ascontiguousarray(as_written(config, name, tensor.numpy())))]
    theirs = table.get_name(name) or table.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
    theirs += ".bias" if theirs.endswith("exp_probs_b") else ""
    return [(theirs, np.ascontiguousarray(as_written(config, name, tensor.numpy())))]


def write(path, family, kind=Kind.F32, without=()):
    model = plain_model(family)
    config, architecture = model.config, getattr(gguf.MODEL_ARCH, ARCHITECTURES[family])
    facts = {name: fact for name, fact in facts_of(config, family).items() if name not in without}
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = new_writer(path, name, facts, f"{name}.")
    add_tokenizer(writer)
    table = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name in model.all_tied_weights_keys:
            continue
        for theirs, values in written(table, config, name, tensor):
            stored = kind if values.ndim >= 2 and values.shape[-1] % 32 == 0 and "conv" not in theirs else Kind.F32
            stored = Kind.F32 if "ssm_norm" in theirs or "ffn_gate_inp" in theirs else stored
            writer.add_tensor(theirs, values if stored == Kind.F32 else gguf.quantize(values, stored), raw_dtype=stored)
    finish(writer)
    return path


def logits(model):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits[0]


@families
def test_a_file_gives_the_model_that_was_written(tmp_path, family):
    loaded = load_model(write(tmp_path / "model.gguf", family), torch.float32, CPU, 1, pack=False)

    torch.testing.assert_close(logits(loaded.model), logits(plain_model(family)), rtol=1e-4, atol=1e-4)


@families
def test_blocks_are_read_as_they_are(tmp_path, family):
    file = write(tmp_path / "model.gguf", family, Kind.Q8_0)
    full = load_model(file, torch.float32, CPU, 1, pack=False)
    blocks = load_model(file, torch.float32, CPU, 1, weights="file")
    check_tree_attention(blocks)

    assert len(blocks.formats) > 10
    ours, expected = logits(blocks.model), logits(full.model)
    native = ModelRunner(blocks, 64, blocks.vocab_size, "native")
    (steps,) = native.read(TOKENS[0], 32)
    assert native.backend == "native"
    for found in (ours, steps.logits):
        differences = (found - expected).abs().amax(1) / (expected.max() - expected.min())
        assert differences.median() < 0.05  # a row may choose another expert where two are nearly equal


@pytest.mark.parametrize("weights", ["full", "file"])
def test_lfm2_is_packed_from_its_file_as_the_general_loader_packs_it(tmp_path, weights):
    file = write(tmp_path / "model.gguf", "lfm2", Kind.Q8_0)
    ours = load_described(Source.find(file), torch.bfloat16, 1, weights, lambda: pytest.fail("a model was made"))
    theirs = load_model(file, torch.bfloat16, CPU, 1, weights=weights)

    assert ours.sizes == theirs.sizes
    assert ours.formats.keys() | {"lm_head"} == theirs.formats.keys() | {"lm_head"}
    for name in ours.tensors.keys() & theirs.tensors.keys():
        assert torch.equal(ours.tensors[name], theirs.tensors[name]), name
    assert len(ours.tensors.keys() & theirs.tensors.keys()) > 20


@pytest.mark.parametrize(
    ("family", "fact"),
    [("lfm2", "attention.head_count_kv"), ("qwen3_5", "ssm.group_count"), ("granite", "ssm.inner_size")],
)
def test_a_fact_that_is_missing_is_named(tmp_path, family, fact):
    with pytest.raises(YggdrasilError, match=f"its {fact} is None"):
        load_model(write(tmp_path / "model.gguf", family, without=[fact]), torch.float32, CPU, 1)
