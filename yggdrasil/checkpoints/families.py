"""What differs between model families in transformers: names of classes, and of the argument that takes a cache."""

import inspect
from functools import cache
from pathlib import Path

from torch import nn

from yggdrasil.artifacts import parse_json

_MIMO = "mimo"


def register_family(folder: Path) -> None:
    """Let transformers know the family of the model in ``folder``, if it is one of these.

    What is wrong with a configuration is said when it is read.
    """
    try:
        config = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(config, dict) and config.get("model_type") == _MIMO:
        _register_mimo()


@cache
def _register_mimo() -> None:
    """MiMo is Qwen2; only the drafting layers that lie beside it are its own."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    class MiMoConfig(Qwen2Config):
        model_type = _MIMO

    class MiMoForCausalLM(Qwen2ForCausalLM):
        config_class = MiMoConfig

    AutoConfig.register(_MIMO, MiMoConfig)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def cache_name(model: nn.Module) -> str:
    """What the model's forward and its output call a cache; transformers 5.24 renamed it and warns of the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
