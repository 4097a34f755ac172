"""Differences between model families in transformers: unregistered classes, and the name of the cache argument."""

import inspect
from functools import cache
from pathlib import Path

from torch import nn

from yggdrasil.artifacts import parse_json

_MIMO = "mimo"


def register_family(folder: Path) -> None:
    """Register the classes of the model in ``folder`` with transformers if it lacks them. This is so for MiMo.

    An unreadable config.json is ignored here; reading it later raises.
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


def cache_name(model: nn.Module) -> str:
    """Return the name of the cache argument of the model's forward, "cache" or "past_key_values".

    Transformers 5.24 renamed it.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
