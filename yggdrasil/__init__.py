"""Yggdrasil: latency-optimal speculative tree decoding of one request, with exactly the target model's output."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Constraint", "Decoder", "SamplingParams", "Speculation", "YggdrasilError", "__version__", "custom_generate"]

if TYPE_CHECKING:
    from yggdrasil.acceptance.sampling import Constraint, SamplingParams
    from yggdrasil.acceptance.speculation import Speculation
    from yggdrasil.errors import YggdrasilError
    from yggdrasil.in_transformers import custom_generate
    from yggdrasil.pretrained import Decoder


_LAZY = {  # imported on first use: packages that need no torch import without it
    "Constraint": "acceptance.sampling",
    "SamplingParams": "acceptance.sampling",
    "Speculation": "acceptance.speculation",
    "Decoder": "pretrained",
    "custom_generate": "in_transformers",
    "YggdrasilError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'yggdrasil' has no attribute {name!r}")
    return getattr(import_module(f"yggdrasil.{_LAZY[name]}"), name)
