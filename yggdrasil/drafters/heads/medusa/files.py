"""Load Medusa heads: tensors are renamed to one spelling, and sizes are read from their shapes."""

import re
from pathlib import Path

import torch
from torch import Tensor

from yggdrasil.artifacts import parse_json, shown
from yggdrasil.drafters.heads.kinds import MEDUSA_PREFIX
from yggdrasil.drafters.heads.medusa.module import MedusaHeads, MedusaSettings
from yggdrasil.drafters.heads.tensors import drafted_tokens, fill, read_tensors, refuse_others, under_our_names
from yggdrasil.errors import YggdrasilError

_OWN_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OWN_OUTPUT = re.compile(r"(\d+)\.\d+\.weight")
_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
_FIRST_OUTPUT = "lm_heads.0.weight"
_PREFIXES = (MEDUSA_PREFIX, "medusa_heads.")


def open_medusa(folder: Path, dtype: torch.dtype) -> MedusaHeads:
    """Load the Medusa heads in ``folder``, with weights in ``dtype``. Sizes follow from the tensors' shapes.

    Raises:
        YggdrasilError: the tensors are not those of Medusa heads.
    """
    found = read_tensors(folder, (MEDUSA_PREFIX,)) or read_tensors(folder)
    tensors = under_our_names(folder, found, _renamed)
    table = tensors.pop("token_map", None)
    settings = _settings(folder, tensors, table)
    if table is not None:
        table = drafted_tokens(folder, "token_map", table.flatten(), settings.vocab_size)
        for name, tensor in tensors.items():  # some files have a map and all rows
            if name.startswith("lm_heads.") and len(tensor) == settings.vocab_size > len(table):
                tensors[name] = tensor[table]
        tensors["d2t"] = table - torch.arange(len(table))
    if settings.is_shared:  # as vLLM does, use the first LM head; some files have a copy per head
        tensors = {
            name: each for name, each in tensors.items() if not name.startswith("lm_heads.") or name == _FIRST_OUTPUT
        }
    with torch.device("meta"):
        heads = MedusaHeads(settings)
    refuse_others(folder, tensors, heads)
    fill(heads, tensors, dtype)
    return heads


def _renamed(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if found := _OWN_LAYER.fullmatch(name):
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    if found := _OWN_OUTPUT.fullmatch(name):
        return f"lm_heads.{found[1]}.weight"
    return _FIRST_OUTPUT if name == "lm_head.weight" else name


def _settings(folder: Path, tensors: dict[str, Tensor], table: Tensor | None) -> MedusaSettings:
    """Read the sizes from the tensors; missing tensors are reported later, by ``refuse_others``."""
    layers = [found for name in tensors if (found := _LAYER.fullmatch(name))]
    if not layers or _FIRST_OUTPUT not in tensors:
        raise YggdrasilError(
            f"{shown(folder)} lacks {_FIRST_OUTPUT} or blocks.0.layers.0.weight; fetch the heads again"
        )
    for name in (_FIRST_OUTPUT, layers[0][0]):
        if tensors[name].ndim != 2:
            raise YggdrasilError(f"{shown(folder)}: {name} is no matrix; fetch the heads again")
    config = parse_json((folder / "config.json").read_bytes())
    rows = len(tensors[_FIRST_OUTPUT])
    vocab_size = rows if table is None else config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise YggdrasilError(
            f"{shown(folder / 'config.json')} has no vocab_size beside a token_map; fetch the heads again"
        )
    return MedusaSettings(
        num_heads=1 + max(int(found[1]) for found in layers),
        num_layers=1 + max(int(found[2]) for found in layers),
        hidden_size=tensors[layers[0][0]].shape[-1],
        vocab_size=vocab_size,
        draft_vocab_size=rows if table is None else table.numel(),
        has_bias=any(name.startswith("blocks.") and name.endswith(".bias") for name in tensors),
        is_shared=bool(config.get("original_lm_head")),
        has_own_vocabulary=table is not None,
    )
