"""Describes the computation of a decoder from its configuration alone, without importing model code."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from yggdrasil.checkpoints.recurrent import Recurrence
from yggdrasil.runtime.native_steps.families import (
    BOTH,
    CONVOLUTION,
    DELTA,
    DENSE,
    EXPERTS,
    FAMILIES,
    FULL,
    SLIDING,
    SPACE,
    Config,
    Family,
    NormKind,
    Turn,
    rotary_layers,
    with_defaults,
)
from yggdrasil.runtime.native_steps.mixtures import Mixture

# The kernels' numbers of activations; relu2 is relu(x) * x.
_ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "relu2": 2}
# Configuration fields whose models are not covered.
_UNSERVED = ("use_bidirectional_attention", "use_bidirectional")


@dataclass(frozen=True)
class LayerShape:
    """Properties that differ between the layers of a model."""

    kind: str  # one of the types of layers in ``families.py``, such as FULL
    window: int  # sliding window: number of last keys on its path that a row sees, its own included; 0 means all
    rope: str | None  # name of the rotary table in ``Description.ropes``; None without rotary embedding


@dataclass(frozen=True)
class StateSpace:
    """Properties of Mamba-2 layers other than the sizes of their recurrence."""

    limits: tuple[float, float]  # least and greatest time step
    is_normed_first: bool  # whether the norm of the outputs, if there is one, is applied before their gate


@dataclass(frozen=True)
class Scales:
    """Factors of the outputs of a layer's parts, as in Granite and Falcon-H1."""

    attention: float = 1.0  # of attention's output, before it is added to the residual
    state: float = 1.0  # of the recurrence's output, before it is added to the residual
    mlp: float = 1.0  # of the MLP's output, before it is added to the residual
    gate: float = 1.0  # of the output of the MLP's gate projection
    inputs: tuple[float, ...] = (1.0,) * 5  # of Mamba-2's gate, values, keys, queries and time steps


@dataclass(frozen=True)
class Description:
    """Sizes and layer properties of a decoder-only model."""

    vocab_size: int
    hidden_size: int
    inner_size: int  # intermediate size of the MLP
    query_heads: int
    key_heads: int
    head_size: int
    norm_eps: float
    norm_kind: NormKind
    activation: int  # of the MLP: 0 SiLU, 1 tanh-approximated GELU, both of its gate; 2 squared ReLU, without a gate
    turn: Turn  # kind of rotary embedding
    scale: float  # of attention scores
    softcap: float  # of attention scores; 0 means none
    embedding_scale: float
    is_scale_rounded: bool  # whether ``embedding_scale`` is rounded to the rows' dtype first
    scales: Scales
    logit_divisor: float
    logit_softcap: float  # 0 means none
    ropes: Mapping[str, Config]  # transformers' ``rope_parameters`` by name
    layers: tuple[LayerShape, ...]
    max_positions: int
    rotary_size: int  # number of a head's first channels that are rotated
    is_gated: bool  # whether each query head has a gate, whose sigmoid multiplies the head's output
    recurrence: Recurrence | None
    state_space: StateSpace | None  # of Mamba-2 layers
    mixture: Mixture | None  # of layers whose MLP is a mixture of experts


def describe(config: Config) -> Description | None:
    """Return the sizes and layer properties of the model with the configuration ``config`` (config.json as a mapping).

    Returns None if native steps do not support the model.

    Raises:
        KeyError, TypeError or ValueError: a field is missing or invalid.
    """
    full = with_defaults(config)
    if full is None:
        return None
    family = FAMILIES[full["model_type"]]
    ropes = _ropes(full, family)
    types, turning = list(family.types(full)), _turning(full)
    if ropes is None or not _is_served(full, types):
        return None
    has_two = set(ropes) == {FULL, SLIDING}
    window = int(full.get("sliding_window") or 0)
    layers = tuple(
        LayerShape(kind, window if kind == SLIDING else 0, (kind if has_two else FULL) if turns else None)
        for kind, turns in zip(types, turning(types), strict=True)
    )
    size = int(full["head_dim"])
    scales, scores = _scales(full)
    scale = float(full.get("query_pre_attn_scalar") or size) ** -0.5 * scores
    activation = _ACTIVATIONS[full["hidden_act"]]
    return Description(
        int(full["vocab_size"]), int(full["hidden_size"]), family.inner_size(full),
        int(full["num_attention_heads"]), int(full["num_key_value_heads"]), size,
        float(full["rms_norm_eps"]), family.norm_kind, activation, family.turn,
        float(full["attention_multiplier"]) if "attention_multiplier" in full else scale,
        float(full.get("attn_logit_softcapping") or 0.0),
        full["hidden_size"] ** 0.5 if family.scales_embedding else float(full.get("embedding_multiplier") or 1.0),
        family.scales_embedding,
        scales, float(full.get("logits_scaling") or 1.0) / float(full.get("lm_head_multiplier") or 1.0),
        float(full.get("final_logit_softcapping") or 0.0),
        ropes, layers, int(full.get("max_position_embeddings") or 1 << 20),
        int(size * _rotary_share(full, family)), family.is_gated,
        Recurrence.of(SimpleNamespace(**full | {"layer_types": types})), _state_space(full, types),
        Mixture.of(full),
    )  # fmt: skip


def _is_served(full: Config, types: Sequence[str]) -> bool:
    """Return whether native steps run layers of ``types`` with the activation and other properties of ``full``."""
    recurrent = {
        "conv_L_cache": {CONVOLUTION}, "linear_num_value_heads": {DELTA}, "mamba_d_state": {SPACE, BOTH},
        "ssm_state_size": {SPACE, DENSE, EXPERTS},
    }  # fmt: skip
    kinds = {FULL} | next((kinds for name, kinds in recurrent.items() if name in full), {SLIDING})
    # Falcon-H1 multiplies the inputs of linear layers, which we do with their outputs, biases included.
    is_biased = full["model_type"] == "falcon_h1" and any(
        full.get(f"{name}_bias") for name in ("mamba_proj", "projectors", "attention", "mlp")
    )
    return (
        full["hidden_act"] in _ACTIVATIONS
        and (full["hidden_act"] == "relu2") == (full["model_type"] == "nemotron_h")
        and full.get("mamba_hidden_act", "silu") == "silu"
        and not any(full.get(name) for name in _UNSERVED)
        and (full.get("quantization_config") or {"quant_method": "mxfp4"}).get("quant_method") == "mxfp4"
        and not is_biased
        and full.get("n_group", 1) == full.get("decoder_sparse_step", 1) == 1
        and not full.get("mlp_only_layers")
        and not set(types) - kinds
        and len(types) == full["num_hidden_layers"]
    )


def _scales(full: Config) -> tuple[Scales, float]:
    """Return the factors of the outputs of a layer's parts, and the factor of attention scores."""
    if full["model_type"] != "falcon_h1":
        scale = float(full.get("residual_multiplier") or 1.0)
        return Scales(scale, scale, scale), 1.0
    said = {
        name: float(full.get(f"{name}_multiplier", 1.0))
        for name in ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
    }
    gate, down = full.get("mlp_multipliers") or (1.0, 1.0)
    inputs = tuple(said["ssm_in"] * float(each) for each in full.get("ssm_multipliers") or [1.0] * 5)
    scales = Scales(said["attention_in"] * said["attention_out"], said["ssm_out"], float(down), float(gate), inputs)
    return scales, said["attention_in"] ** 2 * said["key"]


def _state_space(full: Config, types: Sequence[str]) -> StateSpace | None:
    if not {SPACE, BOTH} & set(types):
        return None
    least, most = full.get("time_step_limit") or (0.0, math.inf)
    if full["model_type"] == "nemotron_h":
        least, most = full["time_step_min"], math.inf
    return StateSpace((float(least), float(most)), bool(full.get("mamba_norm_before_gate", False)))


def _turning(config: Config) -> Callable[[Sequence[str]], Sequence[int]]:
    """Return a function from the layer types to a list with 1 for each layer with rotary embeddings, else 0."""
    if config["model_type"] == "smollm3":
        return lambda types: rotary_layers(config)
    if config["model_type"] == "exaone4" and config.get("sliding_window"):
        return lambda types: [int(kind == SLIDING) for kind in types]
    if config["model_type"] == "nemotron_h" or (
        config["model_type"] == "granitemoehybrid" and config.get("position_embedding_type") != "rope"
    ):
        return lambda types: [0] * len(types)
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
        whole = {**said, **(config.get("rope_scaling") or {})}
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
        if rope["rope_type"] not in ("default", "linear", "llama3", "longrope", "yarn") or is_partial:
            return None
    return dict(named)


def _rotary_share(config: Config, family: Family) -> float:
    """Return the share of a head's channels that are rotated, 0 to 1."""
    said = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return family.rotary_share if said is None else float(said)
