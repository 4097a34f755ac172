"""Differences between model families in transformers: classes, joined layers, and the name of the cache argument."""

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.artifacts import parse_json

_MIMO = "mimo"


def register_family(folder: Path) -> None:
    """Register the classes of the model in ``folder`` with transformers if transformers lacks them, as for MiMo.

    An unreadable config.json is ignored.
    """
    try:
        config = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(config, dict) and config.get("model_type") == _MIMO:
        _register_mimo()


@cache
def _register_mimo() -> None:
    """Register MiMo as Qwen2, which it equals except for its drafting layers."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    class MiMoConfig(Qwen2Config):
        model_type = _MIMO

    class MiMoForCausalLM(Qwen2ForCausalLM):
        config_class = MiMoConfig

    AutoConfig.register(_MIMO, MiMoConfig)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def split_projections(model: nn.Module) -> None:
    """Replace the joint linear layers of Qwen3-Next's gated delta networks by separate layers as in Qwen3.5, in place.

    In Qwen3-Next one linear layer gives queries, keys, values and gates, and another one gives strengths and decays.
    The rows of both are grouped by key head.
    The outputs stay the same. Models of other families are not changed.
    """
    for module in model.modules():
        if type(module).__name__ == "Qwen3NextGatedDeltaNet":
            _split_projections(module)


def _split_projections(network: Any) -> None:
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

    keys, group = network.num_k_heads, network.num_v_heads // network.num_k_heads
    values = group * network.head_v_dim

    def parts(layer: nn.Linear, sizes: list[int]) -> list[Tensor]:
        return [part.flatten(0, 1) for part in layer.weight.detach().unflatten(0, (keys, -1)).split(sizes, 1)]

    query, key, value, gate = parts(network.in_proj_qkvz, [network.head_k_dim] * 2 + [values] * 2)
    strengths, decays = parts(network.in_proj_ba, [group] * 2)
    for name, weight in (("qkv", torch.cat([query, key, value])), ("z", gate), ("b", strengths), ("a", decays)):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        setattr(network, f"in_proj_{name}", layer)
    del network.in_proj_qkvz, network.in_proj_ba
    network.__class__ = Qwen3_5MoeGatedDeltaNet


def cache_name(model: nn.Module) -> str:
    """Return the name of forward's cache argument: "cache", or "past_key_values" before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
