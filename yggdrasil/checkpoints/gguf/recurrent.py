"""Recurrent layers in GGUF files: metadata, and weights that llama.cpp's converter transforms.

For gated delta networks, the file stores the first value head of every key head, then the second of every key head, and
so on, while the model stores the value heads of one key head contiguously. For these networks and for Mamba-2, the file
stores -exp(A_log), the model A_log.

Dims: Hk key heads, Hv value heads, Dk and Dv their sizes.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.checkpoints.gguf.values import unsupported_fact as _unsaid

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_Values = npt.NDArray[Any]
_QWEN3_NEXT = "qwen3next"  # whose files do not interleave value heads
_SHORT, DELTA, _SPACE = ("lfm2", "lfm2moe"), ("qwen35", "qwen35moe", _QWEN3_NEXT), "granitehybrid"
NEMOTRON = ("nemotron_h", "nemotron_h_moe")
_BOTH = "falcon-h1"  # whose layers have attention and a state
RECURRENT = (*_SHORT, *DELTA, *NEMOTRON, _SPACE, _BOTH)
_JOINED, _PARTS = ".in_proj_ba.weight", (".in_proj_b.weight", ".in_proj_a.weight")  # in Qwen3-Next's files


def recurrent_facts(header: GgufHeader) -> dict[str, Any]:
    """Return the configuration fields of a GGUF file's recurrent layers, by transformers' names; empty without any.

    Raises:
        YggdrasilError: metadata is missing or inconsistent.
    """
    if header.architecture in _SHORT:
        return _short_facts(header)
    if header.architecture == _SPACE:
        return _space_facts(header)
    if header.architecture == _BOTH:
        return _mamba_facts(header, 0) | {
            "mamba_d_ssm": header.fact("ssm.inner_size"), "mamba_rms_norm": "blk.0.ssm_norm.weight" in header.tensors,
            "mamba_norm_before_gate": False,
        }  # fmt: skip
    if header.architecture in NEMOTRON:
        return _nemotron_facts(header)
    return _delta_facts(header) if header.architecture in DELTA else {}


def _key_heads(header: GgufHeader) -> list[int]:
    """Return the number of key heads of every layer, 0 for recurrent layers."""
    heads = header.fact("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != header.fact("block_count") or not any(heads):
        raise _unsaid(header, "attention.head_count_kv", heads)
    return heads


def _sizes(header: GgufHeader, *more: str) -> dict[str, int]:
    """Return the metadata of the states' sizes and of ``more`` fields. Raises YggdrasilError unless positive."""
    sizes = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    facts = {name: header.fact(name) for name in (*more, *(f"ssm.{size}" for size in sizes))}
    for name, fact in facts.items():
        if not isinstance(fact, int) or fact < 1:
            raise _unsaid(header, name, fact)
    if facts["ssm.inner_size"] % facts["ssm.time_step_rank"] or facts["ssm.time_step_rank"] % facts["ssm.group_count"]:
        raise _unsaid(header, "ssm.time_step_rank", facts["ssm.time_step_rank"])
    return facts


def _space_facts(header: GgufHeader) -> dict[str, Any]:
    """Return the configuration fields of Granite 4 hybrid, rotary only with metadata ``rope.scaling.finetuned``."""
    heads, facts = _key_heads(header), _sizes(header, "embedding_length", "feed_forward_length")
    first = next(number for number, each in enumerate(heads) if not each) if not all(heads) else 0
    return _mamba_facts(header, first) | {
        "num_key_value_heads": int(max(heads)), "num_local_experts": 0,
        "shared_intermediate_size": header.fact("expert_shared_feed_forward_length", facts["feed_forward_length"]),
        "layer_types": ["full_attention" if each else "linear_attention" for each in heads],
        "position_embedding_type": "rope" if header.fact("rope.scaling.finetuned") else None,
        "mamba_expand": facts["ssm.inner_size"] // facts["embedding_length"],
    }  # fmt: skip


def _mamba_facts(header: GgufHeader, layer: int) -> dict[str, Any]:
    """Return the configuration fields of Mamba-2; ``layer`` is the index of a layer with a state."""
    facts = _sizes(header)
    count = facts["ssm.time_step_rank"]
    return {
        "mamba_d_conv": facts["ssm.conv_kernel"], "mamba_d_state": facts["ssm.state_size"],
        "mamba_n_groups": facts["ssm.group_count"], "mamba_n_heads": count,
        "mamba_d_head": facts["ssm.inner_size"] // count,
        "mamba_conv_bias": f"blk.{layer}.ssm_conv1d.bias" in header.tensors,
        "mamba_proj_bias": f"blk.{layer}.ssm_in.bias" in header.tensors,
    }  # fmt: skip


def _nemotron_facts(header: GgufHeader) -> dict[str, Any]:
    """Return the configuration fields of Nemotron-H, whose layers are a state, attention or an MLP alone."""
    heads, facts = _key_heads(header), _sizes(header)
    if header.fact("expert_group_count", 1) not in (0, 1):
        raise _unsaid(header, "expert_group_count", header.fact("expert_group_count"))
    count, tensors = facts["ssm.time_step_rank"], header.tensors
    parts = {"attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    kinds = [
        next((kind for part, kind in parts.items() if f"blk.{layer}.{part}.weight" in tensors), "linear_attention")
        for layer in range(len(heads) - int(header.fact("nextn_predict_layers", 0)))  # without drafting layers
    ]
    wide = f"blk.{kinds.index('mlp')}.ffn_up.weight" if "mlp" in kinds else None
    return {
        "layers_block_type": kinds, "num_hidden_layers": len(kinds), "num_key_value_heads": int(max(heads)),
        "intermediate_size": tensors[wide].shape[0] if wide else 2 * header.fact("embedding_length"),
        "conv_kernel": facts["ssm.conv_kernel"],
        "ssm_state_size": facts["ssm.state_size"], "n_groups": facts["ssm.group_count"], "mamba_num_heads": count,
        "mamba_head_dim": facts["ssm.inner_size"] // count,
        "layer_norm_epsilon": header.fact(
            "attention.layer_norm_rms_epsilon", header.fact("attention.layer_norm_epsilon", 1e-5)
        ),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
        "use_bias": any(name.endswith("ssm_in.bias") for name in tensors),
        "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in tensors),
        "norm_topk_prob": bool(header.fact("expert_weights_norm", True)),
        "moe_latent_size": header.fact("moe_latent_size"),
    }  # fmt: skip


def shapes_in_file(architecture: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by name, with weights joined that Qwen3-Next's file stores as one."""
    if architecture != _QWEN3_NEXT:
        return shapes
    found: dict[str, tuple[int, ...]] = {}
    for name, (rows, *others) in shapes.items():
        stem = next((name.removesuffix(part) for part in _PARTS if name.endswith(part)), None)
        found |= {name: (rows, *others)} if stem is None else {stem + _JOINED: (2 * rows, *others)}
    return found


def split_joined(config: "PretrainedConfig", weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``weights``, each (name, values), with Qwen3-Next's ``in_proj_ba`` split into ``in_proj_b`` and ``_a``."""
    for name, weight in weights:
        if not name.endswith(_JOINED):
            yield name, weight
            continue
        parts = weight.unflatten(0, (config.linear_num_key_heads, 2, -1)).unbind(1)
        for end, part in zip(_PARTS, parts, strict=True):
            yield name.removesuffix(_JOINED) + end, part.flatten(0, 1).contiguous()


def whole_name_in_table(config: "PretrainedConfig", name: str) -> str:
    """Return the name of the transformers weight ``name`` in llama.cpp's table; only Nemotron-H's names differ."""
    if config.model_type != "nemotron_h" or not name.startswith("model."):
        return name
    if ".experts." in name:
        return name.replace(".mixer.", ".mlp.")
    return name.replace("model.", "backbone.", 1).replace("_correction_bias", "_correction.bias")


def name_in_table(config: "PretrainedConfig", stem: str) -> str:
    """Return the name of the transformers layer ``stem`` in llama.cpp's table; only Granite hybrids' names differ.

    ``stem`` is the name of a weight without ".weight" or ".bias".
    """
    if config.model_type != "granitemoehybrid":
        return stem
    shared = ".mlp.shared_mlp." if getattr(config, "num_local_experts", 0) else ".mlp."
    for ours, theirs in (
        (".block_sparse_moe.router", ".block_sparse_moe.router.layer"), (".block_sparse_moe.experts.", ".mlp.experts."),
        (".shared_mlp.output_linear", f"{shared}down_proj"), (".shared_mlp.", shared),
    ):  # fmt: skip
        if ours in stem:
            return stem.replace(ours, theirs)
    return stem


def _short_facts(header: GgufHeader) -> dict[str, Any]:
    heads = _key_heads(header)
    return {
        "num_key_value_heads": int(max(heads)), "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "norm_eps": header.fact("attention.layer_norm_rms_epsilon"),
    }  # fmt: skip


def _delta_facts(header: GgufHeader) -> dict[str, Any]:
    facts = _sizes(header, "block_count")
    count = facts["block_count"] - int(header.fact("nextn_predict_layers", 0))  # without the drafting layers after them
    interval = int(header.fact("full_attention_interval", 4))
    recurrent = header.fact("attention.recurrent_layers", [bool((layer + 1) % interval) for layer in range(count)])
    width, rotated = header.fact("attention.key_length"), header.fact("rope.dimension_count")
    if not isinstance(width, int) or not isinstance(rotated, int) or not 0 < rotated <= width:
        raise _unsaid(header, "rope.dimension_count", rotated)
    if (scaling := header.fact("rope.scaling.type", "none")) != "none":
        raise _unsaid(header, "rope.scaling.type", scaling)
    sections = header.fact("rope.dimension_sections", [11, 11, 10, 0])
    rope = {
        "rope_type": "default", "rope_theta": float(header.fact("rope.freq_base", 1e7)),
        "partial_rotary_factor": rotated / width, "mrope_section": list(sections)[:3], "mrope_interleaved": True,
    }  # fmt: skip
    return {
        "num_hidden_layers": count, "rope_parameters": rope,
        "layer_types": ["linear_attention" if each else "full_attention" for each in list(recurrent)[:count]],
        "linear_conv_kernel_dim": facts["ssm.conv_kernel"], "linear_key_head_dim": facts["ssm.state_size"],
        "linear_num_key_heads": facts["ssm.group_count"], "linear_num_value_heads": facts["ssm.time_step_rank"],
        "linear_value_head_dim": facts["ssm.inner_size"] // facts["ssm.time_step_rank"],
    }  # fmt: skip


def has_permuted_columns(architecture: str, config: "PretrainedConfig", name: str) -> bool:
    """Return whether the columns of a GGUF tensor ``name`` are ordered otherwise than the transformers weight's."""
    if architecture == _QWEN3_NEXT:
        return False
    is_grouped = getattr(config, "linear_num_key_heads", 0) != getattr(config, "linear_num_value_heads", 0)
    return is_grouped and ".ssm_out." in name


def as_in_model(architecture: str, config: "PretrainedConfig", name: str, values: _Values) -> _Values:
    """Transform ``values`` of a GGUF file's tensor ``name`` to the values and row order of the transformers weight.

    If ``values`` are row indices [N, 1], the result is the weight's row order.
    """
    if name.endswith("ssm_a"):
        values = np.log(-values)
    if architecture not in DELTA:
        return values
    part = name.rpartition(".weight")[0].rpartition(".")[2] or name.rpartition(".")[2]
    values = values if architecture == _QWEN3_NEXT else _in_model_order(config, name, values)
    is_norm = part.endswith("norm") and part != "ssm_norm"
    return values - 1 if is_norm and values.ndim == 1 else values


def _in_model_order(config: "PretrainedConfig", name: str, values: _Values) -> _Values:
    """Reorder the rows, or columns, of ``values`` that belong to value heads into the model's order."""
    keys, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim  # rows of queries and keys, which precede the values
    if keys == heads:
        return values
    if ".attn_qkv." in name or ".ssm_conv1d." in name:
        return np.concatenate([values[:first], _grouped(values[first:], keys, heads, size)])
    if ".ssm_out." in name:
        return _grouped(values.T, keys, heads, size).T if values.shape[1] == heads * size else values
    if ".attn_gate." in name:
        return _grouped(values, keys, heads, size)
    if any(part in name for part in (".ssm_alpha.", ".ssm_beta.", ".ssm_dt.", ".ssm_a")):
        return _grouped(values, keys, heads, 1)
    return values


def _grouped(rows: _Values, keys: int, heads: int, size: int) -> _Values:
    """Reorder rows [Hv * size, ..] so that the value heads of one key head are contiguous."""
    return rows.reshape(heads // keys, keys, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)
