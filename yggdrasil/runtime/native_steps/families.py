"""Model families that native steps cover: defaults of their configurations, and properties not recorded in them.

Native steps cover families whose layers consist of linear layers, RMS norms, rotary attention or a recurrence, and an
MLP or a mixture of experts. Other models run with TorchInductor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Config = Mapping[str, Any]
# How an RMS norm applies its weight. 0: after rounding to the rows' dtype; 1: (1 + weight) in float32; 2: in float32.
NormKind = Literal[0, 1, 2]
# Rotary embedding. 0: pairs (i, i + D / 2), every operation rounded; 1: the same pairs in float32; 2: pairs
# (2i, 2i + 1) in float32.
Turn = Literal[0, 1, 2]
# Types of layers: full attention; sliding-window attention; short convolution; gated delta network; Mamba-2; Mamba-2
# and attention; an MLP alone; a mixture of experts alone.
FULL, SLIDING, CONVOLUTION, DELTA = "full_attention", "sliding_attention", "conv", "linear_attention"
SPACE, BOTH, DENSE, EXPERTS = "mamba", "hybrid", "mlp", "moe"
_ATTENTION_LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP_LAYERS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def _usual_biases(config: Config) -> Sequence[str]:
    attention = _ATTENTION_LAYERS if config.get("attention_bias") else ()
    return (*attention, *(_MLP_LAYERS if config.get("mlp_bias") else ()))


@dataclass(frozen=True)
class Family:
    """Defaults of a model family's configuration, and properties that the configuration does not record."""

    defaults: Config
    norm_kind: NormKind = 0
    turn: Turn = 0
    theta: float = 10000.0  # base of the rotary embedding's frequencies
    scales_embedding: bool = False  # whether the embedding is multiplied by the square root of the hidden size
    norms: Literal["before", "behind", "both"] = "before"  # position of the norms relative to attention and MLP
    head_norms: Literal["none", "each", "all"] = "none"  # norms of queries and keys, over each head or all heads
    is_joined: bool = False  # whether query, key and value are one linear layer, and gate and up another
    biases: Callable[[Config], Sequence[str]] = _usual_biases  # returns the names of a layer's linears with a bias
    # Returns the type of each layer.
    types: Callable[[Config], Sequence[str]] = lambda config: [FULL] * config["num_hidden_layers"]
    # Returns the intermediate size of the MLP, or of the shared experts.
    inner_size: Callable[[Config], int] = lambda config: int(config["intermediate_size"])
    rotary_share: float = 1.0  # share of a head's channels that are rotated, unless the configuration gives it
    is_gated: bool = False  # whether each query head has a gate, whose sigmoid multiplies the head's output
    is_mapped: bool = True  # whether weights can be packed from a mapped file, without transformers
    names: Mapping[str, str] = field(default_factory=dict)  # parts of Llama's weight names -> the family's


def _layer_types(pattern: Callable[[Config], int]) -> Callable[[Config], Sequence[str]]:
    """Return a function config -> layer types: the listed ones, else every ``pattern(config)``-th layer FULL."""

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
    return config.get("layer_types") or [FULL if turns else SLIDING for turns in rotary_layers(config)]


def rotary_layers(config: Config) -> Sequence[int]:
    """Return, for each layer of a SmolLM3 configuration, 1 if it has rotary embeddings, else 0."""
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


def _space_types(config: Config) -> Sequence[str]:
    """Return the layer types of a family with Mamba-2, from the fields of several versions of transformers."""
    given = config.get("layer_types") or config.get("layers_block_type")
    if not given and config.get("hybrid_override_pattern"):
        given = [
            {"M": SPACE, "*": FULL, "-": DENSE, "E": EXPERTS}.get(mark, mark)
            for mark in config["hybrid_override_pattern"]
        ]
    if not given and config.get("attn_layer_indices"):
        given = [FULL if i in config["attn_layer_indices"] else SPACE for i in range(config["num_hidden_layers"])]
    names = {"attention": FULL, "linear_attention": SPACE}
    return [names.get(kind, kind) for kind in given or [SPACE] * config["num_hidden_layers"]]


def _alternating_types(config: Config) -> Sequence[str]:
    return config.get("layer_types") or [(FULL if i % 2 else SLIDING) for i in range(config["num_hidden_layers"])]


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
_FEED_FORWARD_NAMES = {
    "mlp.": "feed_forward.",
    "post_attention_layernorm": "pre_ff_layernorm",
    "model.norm": "model.final_layernorm",
}
_DELTA = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MAMBA = {
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2, "time_step_limit": (0.0, math.inf),
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
        {**_DELTA, "num_key_value_heads": 4},
        norm_kind=1, head_norms="each", types=_qwen3_5_types, rotary_share=0.25, is_gated=True, is_mapped=False,
    ),
    "qwen3_5_moe_text": Family(
        {
            **_DELTA, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
        norm_kind=1, head_norms="each", types=_qwen3_5_types, rotary_share=0.25, is_gated=True, is_mapped=False,
        inner_size=lambda config: int(config["shared_expert_intermediate_size"]),
    ),
    "qwen3_next": Family(
        {
            **_DELTA, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
        norm_kind=1, head_norms="each", types=_qwen3_5_types, rotary_share=0.25, is_gated=True, is_mapped=False,
        inner_size=lambda config: int(config["shared_expert_intermediate_size"]),
    ),
    "qwen3_moe": Family(
        {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        types=_qwen_types, head_norms="each", is_mapped=False,
    ),
    "mixtral": Family(
        {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        theta=1e6, types=_all_windowed, is_mapped=False,
    ),
    "gpt_oss": Family(
        {
            "rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128,
            "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
            },
        },
        theta=150000.0, types=_alternating_types, is_mapped=False, names={"mlp.gate.": "mlp.router."},
    ),
    "lfm2_moe": Family(
        {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 8, "conv_L_cache": 3,
            "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        theta=1e6, head_norms="each", types=_lfm2_types, is_mapped=False,
        names=_LFM2_NAMES | {
            "mlp.experts.": "feed_forward.experts.", "mlp.gate.": "feed_forward.gate.",
            "mlp.expert_bias": "feed_forward.expert_bias",
        },
    ),
    "granitemoehybrid": Family(
        {**_MAMBA, "attention_multiplier": 1.0, "num_local_experts": 8, "shared_intermediate_size": 1024,
         "num_experts_per_tok": 2},
        types=_space_types, inner_size=lambda config: int(config["shared_intermediate_size"]), is_mapped=False,
        names={
            "mlp.gate_up_proj": "shared_mlp.input_linear", "mlp.down_proj": "shared_mlp.output_linear",
            "mlp.gate.": "block_sparse_moe.router.", "mlp.experts.": "block_sparse_moe.experts.",
        },
    ),
    "bamba": Family(
        {**_MAMBA, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}, types=_space_types, rotary_share=0.5,
        is_mapped=False, names=_FEED_FORWARD_NAMES,
    ),
    "falcon_h1": Family(
        {**_MAMBA, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "mamba_d_ssm": 1024, "mamba_norm_before_gate": True},
        types=lambda config: [BOTH] * config["num_hidden_layers"], is_mapped=False, names=_FEED_FORWARD_NAMES,
    ),
    "nemotron_h": Family(
        {
            "rms_norm_eps": 1e-5, "hidden_act": "relu2", "head_dim": 128, "num_key_value_heads": 8, "conv_kernel": 4,
            "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "time_step_min": 0.001,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "norm_topk_prob": True,
            "moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0, "n_group": 1,
        },
        types=_space_types, is_mapped=False,
        names={"model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f"},
    ),
}  # fmt: skip
_USUAL = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
# Other names of fields: Gemma's, and LFM2's.
_OTHER_NAMES = {
    "hidden_activation": "hidden_act", "norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings", "mlp_hidden_act": "hidden_act", "layer_norm_epsilon": "rms_norm_eps",
}  # fmt: skip


def names_of(config: Config) -> Mapping[str, str]:
    """Return a map from parts of Llama's weight names to those of the model's family, where they differ.

    ``config`` is config.json as a mapping; ``FAMILIES`` must have its model type.
    """
    return FAMILIES[config["model_type"]].names


def with_defaults(config: Config) -> dict[str, Any] | None:
    """Return ``config`` (config.json as a mapping) with missing fields filled by its model family's defaults.

    Fields that the family names differently are added under Llama's names. Returns None if native steps do not cover
    the family.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    said = {name: value for name, value in config.items() if value is not None or name == "sliding_window"}
    full = {**_USUAL, **family.defaults, **said}
    full |= {ours: said[theirs] for theirs, ours in _OTHER_NAMES.items() if theirs in said}
    if full.get("mamba_d_head") == "auto":
        inner = full.get("mamba_d_ssm") or full["mamba_expand"] * full["hidden_size"]
        full["mamba_d_head"] = inner // full["mamba_n_heads"]
    full.setdefault("num_hidden_layers", len(full.get("layers_block_type") or ()))
    full.setdefault("num_key_value_heads", full["num_attention_heads"])
    full.setdefault("head_dim", full["hidden_size"] // full["num_attention_heads"])
    return full
