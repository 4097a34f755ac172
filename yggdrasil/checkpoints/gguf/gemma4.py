"""Gemma 4 in GGUF files: layers of two kinds, per-layer embeddings, shared keys and values, scales of a router."""

from typing import Any

from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.checkpoints.gguf.values import ROPE_FACTORS, unsupported_fact, values_of

GEMMA4 = "gemma4"
_SCALES = {"scale": "proj", "per_expert_scale": "experts.down_proj"}  # a router's scale -> the weight that it scales


def gemma4_facts(header: GgufHeader) -> dict[str, Any]:
    """Return the configuration fields of a Gemma 4 model from a GGUF file's metadata, by transformers' names.

    Raises:
        YggdrasilError: metadata is missing or inconsistent.
    """
    count = header.fact("block_count")
    near = header.fact("attention.sliding_window_pattern")
    if not isinstance(count, int) or not isinstance(near, list) or len(near) < count or all(near[:count]):
        raise unsupported_fact(header, "attention.sliding_window_pattern", near)
    near = [bool(each) for each in near[:count]]
    sizes = {name: header.fact(name) for name in ("attention.key_length", "attention.key_length_swa")}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise unsupported_fact(header, name, size)
    heads, inner = (_by_layer(header, name, count) for name in ("attention.head_count_kv", "feed_forward_length"))
    shared = int(header.fact("attention.shared_kv_layers", 0))
    far = near.index(False)
    table = header.tensors.get("per_layer_token_embd.weight")
    more = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return more | {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in near],
        "head_dim": sizes["attention.key_length_swa"],
        "num_key_value_heads": heads[near.index(True)] if any(near) else heads[far],
        "per_layer_config": {
            layer: {"head_dim": sizes["attention.key_length"], "num_key_value_heads": heads[layer]}
            for layer, each in enumerate(near) if not each
        },
        "attention_k_eq_v": f"blk.{far}.attn_v.weight" not in header.tensors,
        "num_kv_shared_layers": shared, "intermediate_size": inner[0], "use_double_wide_mlp": inner[-1] != inner[0],
        "hidden_size_per_layer_input": header.fact("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": header.fact("final_logit_softcapping"),
        "enable_moe_block": bool(header.fact("expert_count")), "rope_parameters": _rotation(header),
    }  # fmt: skip


def _rotation(header: GgufHeader) -> dict[str, Any]:
    """Return the rotary parameters; full layers rotate the dimensions whose frequency the file does not divide."""
    factors = header.tensors.get(ROPE_FACTORS)
    divisors = None if factors is None else values_of(header, factors)
    share = 1.0 if divisors is None else float((divisors < 2.0).mean())
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": float(header.fact("rope.freq_base_swa", 1e4))},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": float(header.fact("rope.freq_base", 1e6)),
            "partial_rotary_factor": share,
        },
    }  # fmt: skip


def _by_layer(header: GgufHeader, name: str, count: int) -> list[int]:
    """Return metadata ``name`` of each of ``count`` layers; a single stored value holds for all layers."""
    found = header.fact(name)
    found = found[:count] if isinstance(found, list) else [found] * count
    if len(found) != count or not all(isinstance(each, int) and each > 0 for each in found):
        raise unsupported_fact(header, name, found)
    return [int(each) for each in found]


def table_name_parts(stem: str, suffix: str) -> tuple[str, str]:
    """Return the parts of a Gemma 4 weight's name by which llama.cpp's table of tensor names (gguf-py) finds it.

    ``stem`` and ``suffix`` are the name in transformers, split at its last dot. Both are returned unchanged, except
    for the two scales of a mixture's router: the table names them by the weight that they scale.
    (``X.router``, ``scale``) gives (``X.router.proj``, ``scale``), and (``X.router``, ``per_expert_scale``) gives
    (``X.experts.down_proj``, ``scale``).
    """
    if stem.endswith(".router") and suffix in _SCALES:
        scaled = _SCALES[suffix]
        stem = f"{stem}.{scaled}" if scaled == "proj" else f"{stem.removesuffix('.router')}.{scaled}"
        return stem, "scale"
    return stem, suffix
