"""Model families that native steps cover: defaults of their configurations, and properties that these do not record.

Covered are model families whose layers consist of linear layers, RMS norms, rotary attention or a short convolution,
and a gated MLP. Models with anything else are not covered by native steps and run with TorchInductor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Config = Mapping[str, Any]
# How an RMS norm applies its weight. 0: after rounding to the rows' dtype; 1: (1 + weight) in float32; 2: in float32.
NormKind = Literal[0, 1, 2]
# Rotary embedding. 0: pairs (i, i + D / 2), every operation rounded; 1: the same pairs in float32; 2: pairs
# (2i, 2i + 1) in float32.
Turn = Literal[0, 1, 2]
# Types of layers; the last two have no attention.
FULL, SLIDING, CONVOLUTION, DELTA = "full_attention", "sliding_attention", "conv", "linear_attention"
_ATTENTION_LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP_LAYERS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


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
    rotary_share: float = 1.0  # of a head's numbers, where a configuration does not say it
    is_gated: bool = False
    is_mapped: bool = True  # whether weights can be packed from a mapped file, without transformers
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
    return config.get("layer_types") or [FULL if turns else SLIDING for turns in turning_layers(config)]


def turning_layers(config: Config) -> Sequence[int]:
    """Return 1 for every layer with rotary embeddings, 0 for others (SmolLM3)."""
    every = config.get("no_rope_layer_interval", 4)
    return config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(config["num_hidden_layers"])]


def _all_windowed(config: Config) -> Sequence[str]:
    return [SLIDING if config.get("sliding_window") else FULL] * config["num_hidden_layers"]


def _exaone_types(config: Config) -> Sequence[str]:
    if not config.get("sliding_window"):
        return [FULL] * config["num_hidden_layers"]
    return _layer_types(lambda each: each.get("sliding_window_pattern", 4))(config)


def _qwen3_5_types(config: Config) -> Sequence[str]:
    every = config.get("full_attention_interval", 4)
    return config.get("layer_types") or [
        FULL if (i + 1) % every == 0 else DELTA for i in range(config["num_hidden_layers"])
    ]


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
    "qwen3_5_text": Family(
        {
            "head_dim": 256, "num_key_value_heads": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        },
        norm_kind=1, head_norms="each", types=_qwen3_5_types, rotary_share=0.25, is_gated=True, is_mapped=False,
    ),
}  # fmt: skip
_USUAL = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
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
