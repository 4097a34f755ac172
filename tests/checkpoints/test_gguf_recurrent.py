"""GGUF files of hybrid models, written as llama.cpp's converter writes them, give the model that was written."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import add_tokenizer
from recurrent_models import recurrent_model

from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loading import load_model
from yggdrasil.runtime.selfcheck import check_tree_attention

CPU = torch.device("cpu")
TOKENS = torch.randint(1, 90, (1, 24), generator=torch.Generator().manual_seed(1))
ARCHITECTURES = {"lfm2": "LFM2", "qwen3_5": "QWEN35"}
families = pytest.mark.parametrize("family", ARCHITECTURES)


def facts_of(config, family):
    facts = {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }  # fmt: skip
    if family == "lfm2":
        heads = [config.num_key_value_heads if kind != "conv" else 0 for kind in config.layer_types]
        return facts | {
            "attention.head_count_kv": heads, "attention.layer_norm_rms_epsilon": config.norm_eps,
            "shortconv.l_cache": config.conv_L_cache,
        }  # fmt: skip
    return facts | {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim // 4,
        "rope.dimension_sections": [11, 11, 10, 0], "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads, "full_attention_interval": 4,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
    }  # fmt: skip


def in_turns(config, rows, size):
    """Rows of the heads of values, the first of every head of keys first."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    return rows.reshape(keys, heads // keys, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def as_written(config, name, values):
    if "conv.conv" in name or "conv1d" in name:
        values = values[:, 0]
    if "linear_attn" not in name:
        return values + 1 if name.endswith("norm.weight") and config.model_type == "qwen3_5_text" else values
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


def write(path, family, kind=Kind.F32, without=()):
    model = recurrent_model(family).plain
    config, architecture = model.config, getattr(gguf.MODEL_ARCH, ARCHITECTURES[family])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    adders = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, fact in facts_of(config, family).items():
        if name not in without:
            adders[type(fact)](f"{gguf.MODEL_ARCH_NAMES[architecture]}.{name}", fact)
    add_tokenizer(writer)
    table = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        theirs = table.get_name(name) or table.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        values = np.ascontiguousarray(as_written(config, name, tensor.numpy()))
        stored = kind if values.ndim == 2 and values.shape[1] % 32 == 0 and "conv" not in theirs else Kind.F32
        writer.add_tensor(theirs, values if stored == Kind.F32 else gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits[0]


@families
def test_a_file_gives_the_model_that_was_written(tmp_path, family):
    loaded = load_model(write(tmp_path / "model.gguf", family), torch.float32, CPU, 1, pack=False)

    torch.testing.assert_close(logits(loaded.model), logits(recurrent_model(family).plain), rtol=1e-4, atol=1e-4)


@families
def test_blocks_are_read_as_they_are(tmp_path, family):
    file = write(tmp_path / "model.gguf", family, Kind.Q8_0)
    full = load_model(file, torch.float32, CPU, 1, pack=False)
    blocks = load_model(file, torch.float32, CPU, 1, weights="file")
    check_tree_attention(blocks)

    assert len(blocks.formats) > 10
    ours, expected = logits(blocks.model), logits(full.model)
    assert (ours - expected).abs().max() < 0.05 * (expected.max() - expected.min())


@pytest.mark.parametrize(("family", "fact"), [("lfm2", "attention.head_count_kv"), ("qwen3_5", "ssm.group_count")])
def test_a_fact_that_is_missing_is_named(tmp_path, family, fact):
    with pytest.raises(YggdrasilError, match=f"its {fact} is None"):
        load_model(write(tmp_path / "model.gguf", family, without=[fact]), torch.float32, CPU, 1)
