"""Families whose code transformers has under another name."""

from functools import cache
from pathlib import Path

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
