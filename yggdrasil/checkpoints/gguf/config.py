"""Converts a GGUF file's metadata to a transformers configuration, with llama.cpp's defaults for rotary parameters."""

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.checkpoints.gguf.experts import expert_facts
from yggdrasil.checkpoints.gguf.gemma4 import GEMMA4, gemma4_facts
from yggdrasil.checkpoints.gguf.kinds import refuse_other_kinds
from yggdrasil.checkpoints.gguf.recurrent import DELTA, NEMOTRON, recurrent_facts
from yggdrasil.checkpoints.gguf.values import ROPE_FACTORS, values_of
from yggdrasil.errors import YggdrasilError

# Supported GGUF architecture -> transformers' model type. Tests check for each that a converted model loads unchanged.
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "qwen3moe": "qwen3_moe", "smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "ernie4_5": "ernie4_5",
    "gpt-oss": "gpt_oss", "lfm2": "lfm2", "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text", "granitehybrid": "granitemoehybrid", "lfm2moe": "lfm2_moe",
    "falcon-h1": "falcon_h1", "gemma4": "gemma4_text", "nemotron_h": "nemotron_h", "nemotron_h_moe": "nemotron_h",
    "qwen3next": "qwen3_5_moe_text",  # its layers compute the same, and its file stores separate weights too
}  # fmt: skip
# Architectures whose configuration needs no defaults of transformers' class, unless they are mixtures.
_COMPLETE = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "granite", "olmo2", "ernie4_5", "lfm2", "phi3")
# GGUF metadata -> transformers' name; _COUNTS are integers, _NUMBERS floats.
_COUNTS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}  # fmt: skip
_NUMBERS = {"rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_NEEDED = ("num_hidden_layers", "intermediate_size", "hidden_size", "num_attention_heads", "rms_norm_eps")
_OWN = {
    "llama": {"rope.dimension_count": "head_dim"}, "lfm2": {"shortconv.l_cache": "conv_L_cache"},
    "lfm2_moe": {"shortconv.l_cache": "conv_L_cache", "leading_dense_block_count": "num_dense_layers"},
}  # fmt: skip
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
# Number of layers of Gemma's 27B models, whose attention scale is not derived from the head size.
_MOST_LAYERS_OF_GEMMA = {"gemma2": 46, "gemma3": 62}
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of config.json, ``model_type`` included, from a GGUF file's metadata.

    Fields that the metadata lack are missing or None; ``is_complete`` tells whether transformers' defaults are needed.

    Raises:
        YggdrasilError: the file is no language model, its architecture or rotary scaling is unsupported, or its
            metadata is inconsistent.
    """
    refuse_other_kinds(header)
    name = ARCHITECTURES.get(header.architecture)
    if name is None:
        raise YggdrasilError(
            f"{shown(header.path)} is of architecture {header.architecture}, which is unsupported in GGUF files; "
            f"supported are: {', '.join(ARCHITECTURES)}. Give the checkpoint folder instead"
        )
    known = _OWN.get(name, {}) | _COUNTS | _NUMBERS | (_MULTIPLIERS if name.startswith("granite") else {})
    facts: dict[str, Any] = {"norm_topk_prob": True} if name == "qwen3_moe" else {}
    facts |= {ours: header.fact(theirs) for theirs, ours in known.items() if header.fact(theirs) is not None}
    facts["sliding_window"] = header.fact("attention.sliding_window") or None  # 0: full attention
    facts |= {ours: header.facts.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in _TOKENS.items()}
    facts["tie_word_embeddings"] = "output.weight" not in header.tensors
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise YggdrasilError(f"{shown(header.path)} lacks the tensor token_embd.weight; fetch the file again")
    if isinstance(blocks := header.fact("block_count"), int) and blocks > len(header.tensors):
        raise YggdrasilError(
            f"{shown(header.path)}: its block_count is {blocks}, and it has {len(header.tensors)} tensors; fetch the "
            "file again"
        )
    facts["vocab_size"] = embedding.shape[0]
    facts |= _rope_scaling(header)
    facts |= recurrent_facts(header) if header.architecture != GEMMA4 else gemma4_facts(header)
    if header.architecture in _MOST_LAYERS_OF_GEMMA:
        facts |= _facts_of_gemma(header, facts)
    experts = expert_facts(header)
    kind = "mixtral" if experts and name == "llama" else name
    return {"model_type": kind, **facts, **experts}


def is_complete(header: GgufHeader, config: Mapping[str, Any]) -> bool:
    """Return whether the configuration of a GGUF file is complete and valid without defaults of transformers' class.

    ``config`` is the result of ``read_config`` for the same file.
    """
    counts = [config[name] for name in _COUNTS.values() if name in config]
    numbers = [config[name] for name in (*_NUMBERS.values(), *_MULTIPLIERS.values()) if name in config]
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads", 1)
    return (
        header.architecture in _COMPLETE
        and config["model_type"] != "mixtral"
        and all(name in config for name in _NEEDED)
        and all(type(count) is int and count > 0 for count in counts)
        and all(type(number) is float and 0.0 < number < inf for number in numbers)
        and all(isinstance(config.get(name), int | None) for name in ("sliding_window", *_TOKENS.values()))
        and heads % groups == 0
        and ("head_dim" in config or config["hidden_size"] % heads == 0)
    )


def _facts_of_gemma(header: GgufHeader, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of Gemma: soft-capping, attention scale, and Gemma 3's two sets of rotary parameters."""
    bounds = {name: header.fact(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    found: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    width = _head_width(header)
    if facts.get("num_hidden_layers") == _MOST_LAYERS_OF_GEMMA[header.architecture]:
        width = facts["hidden_size"] // facts["num_attention_heads"]
    found["query_pre_attn_scalar"] = width
    if header.architecture == "gemma3":
        everywhere = {"rope_type": "default", "rope_theta": _number(header, "rope.freq_base", 1e6)}
        near = {"rope_type": "default", "rope_theta": _number(header, "rope.freq_base_swa", 1e4)}
        found["rope_parameters"] = {
            "full_attention": facts.get("rope_parameters") or everywhere, "sliding_attention": near,
        }  # fmt: skip
    return found


def _rope_scaling(header: GgufHeader) -> dict[str, Any]:
    """Return transformers' ``rope_parameters`` if the file scales rotary positions, else an empty dict.

    Raises:
        YggdrasilError: if the scaling is unsupported.
    """
    theta = _number(header, "rope.freq_base", 10000.0)
    factor = _number(header, "rope.scaling.factor", _number(header, "rope.scale_linear", 1.0))  # the older name
    # llama.cpp's default is linear scaling.
    kind = header.fact("rope.scaling.type", "none" if factor == 1.0 else "linear")
    rotated, width = header.fact("rope.dimension_count"), _head_width(header)
    if header.architecture in (*DELTA, *NEMOTRON, GEMMA4):
        return {}  # ``recurrent_facts`` and ``gemma4_facts`` return them; Nemotron-H has none
    if rotated is not None and width is not None and rotated != width:
        raise _unread_rotation(header, f"of {rotated} of {width} channels")
    if ROPE_FACTORS in header.tensors:
        factors = values_of(header, header.tensors[ROPE_FACTORS])
        scaling = {"rope_type": "llama3", "rope_theta": theta, "factor": float(factors.max()), **_LLAMA3_ROPE}
        if np.allclose(factors, _llama3_factors(scaling, len(factors)), rtol=1e-3):
            return {"rope_parameters": scaling}
        kind = "of its own"
    if kind == "yarn":
        return {"rope_parameters": _yarn(header, theta, factor)}
    if kind == "linear":
        return {"rope_parameters": {"rope_type": "linear", "rope_theta": theta, "factor": factor}}
    if kind != "none" or "rope_factors_long.weight" in header.tensors:
        raise _unread_rotation(header, kind if kind != "none" else "longrope")
    return {}


def _yarn(header: GgufHeader, theta: float, factor: float) -> dict[str, Any]:
    """Return YaRN's parameters. ``truncate``, which the metadata lack, is False only for gpt-oss."""
    found = {
        "rope_type": "yarn", "rope_theta": theta, "factor": factor, "truncate": header.architecture != "gpt-oss",
        "original_max_position_embeddings": int(_number(header, "rope.scaling.original_context_length", 0)),
        "beta_fast": _number(header, "rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": _number(header, "rope.scaling.yarn_beta_slow", 1.0),
    }  # fmt: skip
    if header.fact("rope.scaling.attn_factor", 1.0) != 1.0 or header.fact("rope.scaling.yarn_log_multiplier"):
        raise _unread_rotation(header, "yarn with another scale of the scores")
    return found


def _unread_rotation(header: GgufHeader, rule: object) -> YggdrasilError:
    return YggdrasilError(
        f"{shown(header.path)} scales rotary positions by a rule ({rule}) that is unsupported in GGUF files; give the "
        "checkpoint folder instead"
    )


def _head_width(header: GgufHeader) -> Any:
    """Return the size of an attention head; by default the hidden size divided by the number of heads."""
    size, heads = header.fact("embedding_length"), header.fact("attention.head_count")
    share = size // heads if isinstance(size, int) and isinstance(heads, int) and heads > 0 else None
    return header.fact("attention.key_length", share)


def _number(header: GgufHeader, name: str, default: float) -> float:
    """Return metadata ``name`` as float, ``default`` if missing. Raises YggdrasilError unless positive and finite."""
    value = header.fact(name, default)
    if isinstance(value, bool | str | list) or not 0.0 < value < inf:
        raise YggdrasilError(
            f"{shown(header.path)}: its {name} is {value!r}, which is no positive number; fetch the file again"
        )
    return float(value)


def _llama3_factors(scaling: dict[str, Any], count: int) -> npt.NDArray[np.float64]:
    """Return the divisors [count] that llama.cpp applies to the rotary frequencies for ``scaling``."""
    wavelength = 2 * np.pi * scaling["rope_theta"] ** (np.arange(count) / count)
    turns = scaling["original_max_position_embeddings"] / wavelength
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors
