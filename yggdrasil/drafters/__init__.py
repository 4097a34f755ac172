"""Drafters, which propose tokens for the target to verify (``protocol.Drafter``).

Names are imported on first use, so that plans can read ``model_free_options`` without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yggdrasil.drafters.draft_model import DraftModel
    from yggdrasil.drafters.model_free_options import NGramOptions
    from yggdrasil.drafters.ngram import NGramDrafter
    from yggdrasil.drafters.protocol import Budget, Capabilities, Drafter, Step

_HOMES = {
    "Budget": "protocol",
    "Capabilities": "protocol",
    "DraftModel": "draft_model",
    "Drafter": "protocol",
    "NGramDrafter": "ngram",
    "NGramOptions": "model_free_options",
    "Step": "protocol",
}

__all__ = ["Budget", "Capabilities", "DraftModel", "Drafter", "NGramDrafter", "NGramOptions", "Step"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
