"""Describe the computation of a decoder from its configuration as plain JSON, without importing model code."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from yggdrasil.checkpoints.recurrent import Recurrence
from yggdrasil.runtime.native_steps.families import (
    CONVOLUTION,
    DELTA,
    FAMILIES,
    FULL,
    SLIDING,
    Config,
    Family,
    NormKind,
    Turn,
    turning_layers,
    with_defaults,
)

_GELU, _SILU = ("gelu_pytorch_tanh",), ("silu", "swish")
# Configuration fields whose models are not covered.
_UNSERVED = ("use_bidirectional_attention", "quantization_config", "use_bidirectional")


@dataclass(frozen=True)
class LayerShape:
    """Properties that differ between the layers of a model."""

    kind: str  # FULL, SLIDING, CONVOLUTION or DELTA
    window: int  # sliding window: number of keys on its path that a row sees, its own included; 0: all
    rope: str | None  # name of the rotary table in ``Description.ropes``; None: no rotary embedding


@dataclass(frozen=True)
class Description:
    """Sizes and layer properties of a decoder-only model."""

    vocab_size: int
    hidden_size: int
    inner_size: int
    query_heads: int
    key_heads: int
    head_size: int
    norm_eps: float
    norm_kind: NormKind
    is_gelu: bool  # the MLP's gate is tanh-approximated GELU, else SiLU
    turn: Turn
    scale: float  # of attention scores
    softcap: float  # of attention scores; 0: none
    embedding_scale: float
    is_scale_rounded: bool  # whether ``embedding_scale`` is rounded to the rows' dtype first
    residual_scale: float  # factor of the outputs of attention and MLP before they are added to the residual
    logit_divisor: float
    logit_softcap: float  # 0: none
    ropes: Mapping[str, Config]  # transformers' ``rope_parameters`` by name
    layers: tuple[LayerShape, ...]
    max_positions: int
    rotary_size: int  # numbers of a head that are rotated, from its first
    is_gated: bool  # whether each query head has a gate, whose sigmoid multiplies the head's output
    recurrence: Recurrence | None  # of the layers without attention


def describe(config: Config) -> Description | None:
    """Describe the model of ``config`` (config.json as a mapping); return None if it is not covered."""
    full = with_defaults(config)
    if full is None:
        return None
    family = FAMILIES[full["model_type"]]
    ropes = _ropes(full, family)
    types, turning = list(family.types(full)), _turning(full)
    is_served = full["hidden_act"] in _GELU + _SILU and not any(full.get(name) for name in _UNSERVED)
    recurrent = {"conv_L_cache": CONVOLUTION, "linear_num_value_heads": DELTA}
    kinds = {FULL, next((kind for name, kind in recurrent.items() if name in full), SLIDING)}
    if ropes is None or not is_served or set(types) - kinds or len(types) != full["num_hidden_layers"]:
        return None
    has_two = set(ropes) == {FULL, SLIDING}
    window = int(full.get("sliding_window") or 0)
    layers = tuple(
        LayerShape(kind, window if kind == SLIDING else 0, (kind if has_two else FULL) if turns else None)
        for kind, turns in zip(types, turning(types), strict=True)
    )
    size = int(full["head_dim"])
    scale = float(full.get("query_pre_attn_scalar") or size) ** -0.5
    return Description(
        int(full["vocab_size"]), int(full["hidden_size"]), family.inner_size(full),
        int(full["num_attention_heads"]), int(full["num_key_value_heads"]), size,
        float(full["rms_norm_eps"]), family.norm_kind, full["hidden_act"] in _GELU, family.turn,
        float(full["attention_multiplier"]) if "attention_multiplier" in full else scale,
        float(full.get("attn_logit_softcapping") or 0.0),
        full["hidden_size"] ** 0.5 if family.scales_embedding else float(full.get("embedding_multiplier") or 1.0),
        family.scales_embedding,
        float(full.get("residual_multiplier") or 1.0), float(full.get("logits_scaling") or 1.0),
        float(full.get("final_logit_softcapping") or 0.0),
        ropes, layers, int(full.get("max_position_embeddings") or 1 << 20),
        int(size * _rotary_share(full, family)), family.is_gated,
        Recurrence.of(SimpleNamespace(**full | {"layer_types": types})),
    )  # fmt: skip


def _turning(config: Config) -> Callable[[Sequence[str]], Sequence[int]]:
    """Return a function layer types -> 1 for each layer with rotary embeddings, else 0."""
    if config["model_type"] == "smollm3":
        return lambda types: turning_layers(config)
    if config["model_type"] == "exaone4" and config.get("sliding_window"):
        return lambda types: [int(kind == SLIDING) for kind in types]
    return lambda types: [1] * len(types)


def _ropes(config: Config, family: Family) -> Mapping[str, Config] | None:
    """Return rotary parameters by name: one for all layers (``FULL``) or one per type of layer.

    Returns None if a rotary type, or a partial rotation, is unsupported.
    """
    said = config.get("rope_parameters") or {}
    named: dict[str, dict[str, Any]] = {
        name: dict(said[name]) for name in (FULL, SLIDING) if isinstance(said.get(name), Mapping)
    }
    if not named:
        whole = {**(config.get("rope_scaling") or {}), **said}
        whole.setdefault("rope_theta", config.get("rope_theta", family.theta))
        named = {FULL: whole}
    if config["model_type"] == "gemma3_text":
        near = {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", 10000.0)}
        named.setdefault(SLIDING, near)
    for rope in named.values():
        rope.setdefault("rope_type", rope.pop("type", "default"))
        rope.setdefault("rope_theta", family.theta)
        if config["model_type"] == "phi3" and rope["rope_type"] in ("su", "yarn"):
            rope["rope_type"] = "longrope"
        for name in ("max_position_embeddings", "original_max_position_embeddings"):
            if config.get(name) is not None:
                rope.setdefault(name, config[name])
        is_partial = family.rotary_share == 1.0 and _rotary_share({**config, "rope_parameters": rope}, family) != 1.0
        if rope["rope_type"] not in ("default", "linear", "llama3", "longrope") or is_partial:
            return None
    return dict(named)


def _rotary_share(config: Config, family: Family) -> float:
    """Return the share of a head's numbers that are rotated."""
    said = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return family.rotary_share if said is None else float(said)
