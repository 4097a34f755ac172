"""The tensors of a head's folder, under one spelling, checked against its configuration."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yggdrasil.artifacts import shown
from yggdrasil.drafters.heads.module import EagleHead
from yggdrasil.drafters.heads.settings import HeadSettings, read_settings
from yggdrasil.errors import YggdrasilError, first_line

EMBEDDING = "embed_tokens.weight"
_FILES = ("model.safetensors", "pytorch_model.bin")
_SPECULATORS_LAYER, _LAYER = "layers.0.", "midlayer."
# What files hold beyond the head: copies of the target's, and tables that are computed.
_IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d", "rotary_emb.inv_freq")


def open_head(folder: Path, dtype: torch.dtype) -> tuple[EagleHead, Tensor | None]:
    """The head in ``folder`` with weights in ``dtype``, and its own embedding [V, H] where it brings one.

    Raises:
        YggdrasilError: its configuration is not served, or its tensors are not those of its configuration.
    """
    settings = read_settings(folder)
    tensors = _renamed(read_tensors(folder))
    with torch.device("meta"):
        head = EagleHead(settings)
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if EMBEDDING in tensors:
        expected[EMBEDDING] = settings.vocab_size, settings.hidden_size
    _refuse_others(folder, tensors, expected)
    _check_vocabulary(folder, settings, tensors)
    weights = {name: tensor if name == "d2t" else tensor.to(dtype) for name, tensor in tensors.items()}
    embedding = weights.pop(EMBEDDING, None)
    head.load_state_dict(weights, assign=True)
    return head.eval().requires_grad_(False), embedding


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder by name: safetensors, or a ``pytorch_model.bin`` of nothing but tensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors")) or [folder / name for name in _FILES if (folder / name).is_file()]
    if not files:
        raise YggdrasilError(f"{shown(folder)} holds none of {', '.join(_FILES)}; fetch the head again")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            loaded: Any = (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, map_location="cpu", weights_only=True)
            )
            tensors |= loaded
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, EOFError) as error:
            raise YggdrasilError(f"{shown(file)} could not be read: {first_line(error)}; fetch it again") from error
        except Exception as error:  # an unpickler's own refusals share no class
            raise YggdrasilError(
                f"{shown(file)} holds more than tensors, which may be code: {first_line(error)}"
            ) from error
    return tensors


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under EAGLE's names, without what is not the head's."""
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    named = {
        _LAYER + name.removeprefix(_SPECULATORS_LAYER) if name.startswith(_SPECULATORS_LAYER) else name: tensor
        for name, tensor in named.items()
    }
    return {name: tensor for name, tensor in named.items() if not name.endswith(_IGNORED)}


def _refuse_others(folder: Path, tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    if "d2t" not in expected:
        tensors.pop("d2t", None)  # some writers keep a table of zeros
    misshapen = [
        f"{name} ({list(tensors[name].shape)}, not {list(shape)})"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    faults = (("lacks", missing), ("holds, beyond what a head has,", extra), ("has misshapen", misshapen))
    said = [f"{verb} {', '.join(names[:3])}{_more(names)}" for verb, names in faults if names]
    if said:
        raise YggdrasilError(
            f"{shown(folder)} {' and '.join(said)}: its tensors are not those of its config.json; fetch the head again"
        )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 3} more" if len(names) > 3 else ""


def _check_vocabulary(folder: Path, settings: HeadSettings, tensors: dict[str, Tensor]) -> None:
    if not settings.has_own_vocabulary:
        return
    table = tensors["d2t"] = tensors["d2t"].to(torch.int64)
    tokens = table + torch.arange(len(table))
    if int(tokens.min()) < 0 or int(tokens.max()) >= settings.vocab_size or len(tokens.unique()) != len(tokens):
        raise YggdrasilError(
            f"{shown(folder)}: d2t names tokens twice or outside the target's {settings.vocab_size}; fetch it again"
        )
