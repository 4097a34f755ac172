"""Describe the computation of a decoder from its configuration as plain JSON, without importing model code.

Covered are model families whose layers consist of linear layers, RMS norms, rotary attention or a short convolution,
and a gated MLP. Models with anything else are not covered by native steps and run with TorchInductor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from yggdrasil.checkpoints.recurrent import Recurrence

Config = Mapping[str, Any]
# How an RMS norm applies its weight. 0: after rounding to the rows' dtype; 1: (1 + weight) in float32; 2: in float32.
NormKind = Literal[0, 1, 2]
# Rotary embedding. 0: pairs (i, i + D / 2), every operation rounded; 1: the same pairs in float32; 2: pairs
# (2i, 2i + 1) in float32.
Turn = Literal[0, 1, 2]
FULL, SLIDING, CONVOLUTION = "full_attention", "sliding_attention", "conv"  # types of layers
_ATTENTION_LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP_LAYERS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class LayerShape:
    """Properties that differ between the layers of a model."""

    kind: str  # FULL, SLIDING or CONVOLUTION
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
    recurrence: Recurrence | None  # of the layers without attention


def _usual_biases(config: Config) -> Sequence[str]:
    attention = _ATTENTION_LAYERS if config.get("attention_bias") else ()
    return (*attention, *(_MLP_LAYERS if config.get("mlp_bias") else ()))


@dataclass(frozen=True)
class Family:
    """Defaults of a model family's configuration, and properties that it does not record."""

    defaults: Config
    norm_kind: NormKind = 0
    turn: Turn = 0
    theta: float = 10000.0
    scales_embedding: bool = False  # by the square root of the hidden size
    norms: Literal["before", "behind", "both"] = "before"  # position of the norms relative to attention and MLP
    head_norms: Literal["none", "each", "all"] = "none"  # of queries and keys: of each head, or of all heads together
    is_joined: bool = False  # whether query, key and value are one linear layer, and gate and up another
    biases: Callable[[Config], Sequence[str]] = _usual_biases  # returns the names of a layer's linears with a bias
    types: Callable[[Config], Sequence[str]] = lambda config: [FULL] * config["num_hidden_layers"]  # of layers
    inner_size: Callable[[Config], int] = lambda config: int(config["intermediate_size"])
    names: Mapping[str, str] = field(default_factory=dict)  # parts of weight names where they differ from Llama's


def _layer_types(pattern: Callable[[Config], int]) -> Callable[[Config], Sequence[str]]:
    """Return a function config -> layer types: those it lists, else every ``pattern``-th layer full, others sliding."""

    def types(config: Config) -> Sequence[str]:
        if config.get("layer_types"):
            return list(config["layer_types"])
        every = pattern(config)
        return [FULL if every and (i + 1) % every == 0 else SLIDING for i in range(config["num_hidden_layers"])]

    return types


def _qwen_types(config: Config) -> Sequence[str]:
    if not config.get("use_sliding_window"):
        return [FULL] * config["num_hidden_layers"]
    first = config.get("max_window_layers", 28)
    return config.get("layer_types") or [SLIDING if i >= first else FULL for i in range(config["num_hidden_layers"])]


def _smollm_types(config: Config) -> Sequence[str]:
    if not config.get("use_sliding_window"):
        return [FULL] * config["num_hidden_layers"]
    return config.get("layer_types") or [FULL if turns else SLIDING for turns in _turning_layers(config)]


def _turning_layers(config: Config) -> Sequence[int]:
    """Return 1 for every layer with rotary embeddings, 0 for others (SmolLM3)."""
    every = config.get("no_rope_layer_interval", 4)
    return config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(config["num_hidden_layers"])]


def _all_windowed(config: Config) -> Sequence[str]:
    return [SLIDING if config.get("sliding_window") else FULL] * config["num_hidden_layers"]


def _exaone_types(config: Config) -> Sequence[str]:
    if not config.get("sliding_window"):
        return [FULL] * config["num_hidden_layers"]
    return _layer_types(lambda each: each.get("sliding_window_pattern", 4))(config)


def _lfm2_types(config: Config) -> Sequence[str]:
    if config.get("layer_types"):
        return list(config["layer_types"])
    attending = config.get("full_attn_idxs")
    return [FULL if attending is None or i in attending else CONVOLUTION for i in range(config["num_hidden_layers"])]


def _lfm2_inner_size(config: Config) -> int:
    size = int(config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return size
    step = int(config["block_multiple_of"])
    return -(-int(config["block_ffn_dim_multiplier"] * size) // step) * step


_LFM2_NAMES = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "model.norm": "model.embedding_norm",
}  # fmt: skip
_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
_QWEN2 = Family({}, types=_qwen_types, biases=lambda config: _ATTENTION_LAYERS[:3])
FAMILIES: Mapping[str, Family] = {
    "llama": Family({}),
    "mistral": Family({"num_key_value_heads": 8, "sliding_window": 4096}, types=_all_windowed),
    "qwen2": _QWEN2,
    "mimo": _QWEN2,
    "qwen3": Family({"head_dim": 128}, types=_qwen_types, head_norms="each"),
    "gemma": Family(_GEMMA, norm_kind=1, scales_embedding=True),
    "gemma2": Family(
        {
            **_GEMMA, "sliding_window": 4096, "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        norm_kind=1, scales_embedding=True, norms="both", types=_layer_types(lambda _: 2),
    ),
    "gemma3_text": Family(
        {**_GEMMA, "sliding_window": 4096, "query_pre_attn_scalar": 256},
        norm_kind=1, theta=1e6, scales_embedding=True, norms="both", head_norms="each",
        types=_layer_types(lambda config: config.get("sliding_window_pattern", 6)),
    ),
    "smollm3": Family({"tie_word_embeddings": True, "num_key_value_heads": 4}, theta=2e6, types=_smollm_types),
    "granite": Family({"attention_multiplier": 1.0}),
    "phi3": Family({"rms_norm_eps": 1e-5}, types=_all_windowed, is_joined=True),
    "olmo2": Family({"rms_norm_eps": 1e-5}, norm_kind=2, turn=1, norms="behind", head_norms="all"),
    "exaone4": Family(
        {"rms_norm_eps": 1e-5, "sliding_window": 4096}, types=_exaone_types, norms="behind", head_norms="each",
    ),
    "ernie4_5": Family(
        {"rms_norm_eps": 1e-5, "head_dim": 128, "tie_word_embeddings": True, "num_key_value_heads": 2},
        turn=2, theta=500000.0,
        biases=lambda config: (*_ATTENTION_LAYERS, *_MLP_LAYERS) if config.get("use_bias") else (),
    ),
    "lfm2": Family(
        {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 8, "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
        },
        theta=1e6, head_norms="each", types=_lfm2_types, inner_size=_lfm2_inner_size, names=_LFM2_NAMES,
        biases=lambda config: ("conv.in_proj", "conv.conv", "conv.out_proj") if config.get("conv_bias") else (),
    ),
}  # fmt: skip
_USUAL = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
_GELU, _SILU = ("gelu_pytorch_tanh",), ("silu", "swish")
# Configuration fields whose models are not covered.
_UNSERVED = ("use_bidirectional_attention", "quantization_config", "use_bidirectional")
# Other names of fields: Gemma's, and LFM2's.
_OTHER_NAMES = {
    "hidden_activation": "hidden_act", "norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings",
}  # fmt: skip


def names_of(config: Config) -> Mapping[str, str]:
    """Return the parts of weight names of a covered family that differ from Llama's, by Llama's names."""
    return FAMILIES[config["model_type"]].names


def with_defaults(config: Config) -> dict[str, Any] | None:
    """Fill missing fields of ``config`` with its family's defaults; return None if the family is not covered."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    said = {name: value for name, value in config.items() if value is not None or name == "sliding_window"}
    full = {**_USUAL, **family.defaults, **said}
    full |= {ours: said[theirs] for theirs, ours in _OTHER_NAMES.items() if theirs in said}
    full.setdefault("num_key_value_heads", full["num_attention_heads"])
    full.setdefault("head_dim", full["hidden_size"] // full["num_attention_heads"])
    return full


def describe(config: Config) -> Description | None:
    """Describe the model of ``config`` (config.json as a mapping); return None if it is not covered."""
    full = with_defaults(config)
    if full is None:
        return None
    family = FAMILIES[full["model_type"]]
    ropes = _ropes(full, family)
    types, turning = list(family.types(full)), _turning(full)
    is_served = full["hidden_act"] in _GELU + _SILU and not any(full.get(name) for name in _UNSERVED)
    kinds = {FULL, CONVOLUTION if "conv_L_cache" in full else SLIDING}
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
        Recurrence.of(SimpleNamespace(**full | {"layer_types": types})),
    )  # fmt: skip


def _turning(config: Config) -> Callable[[Sequence[str]], Sequence[int]]:
    """Return a function layer types -> 1 for each layer with rotary embeddings, else 0."""
    if config["model_type"] == "smollm3":
        return lambda types: _turning_layers(config)
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
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if rope["rope_type"] not in ("default", "linear", "llama3", "longrope") or partial not in (None, 1, 1.0):
            return None
    return dict(named)
