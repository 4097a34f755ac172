"""Detect the kind of head in a folder from its configuration, or else from the names of its tensors."""

import pickle
import struct
from pathlib import Path
from typing import Any, Literal

from yggdrasil.artifacts import OWN_HEADS, PICKLED_HEAD, head_files, parse_json, shown
from yggdrasil.artifacts.homes import expanded
from yggdrasil.drafters.heads.mtp.files import MTP_NAMES
from yggdrasil.drafters.heads.mtp.gguf import has_mtp, mtp_architecture
from yggdrasil.errors import ArtifactError

Kind = Literal["eagle3", "eagle", "medusa", "mtp", "dflash"]

MEDUSA_PREFIX = "medusa_head."  # of tensors of Medusa heads that are stored with the tensors of their base model
_BLOCKS = ("dflash", "dflash2", "dspark")  # as speculators names them; architectures contain these names
_FUSIONS = ("fc.weight", "fusion_fc.weight")


def is_head(source: str) -> bool:
    """Return whether ``source`` is a folder or GGUF file with a supported draft head; False if it does not exist."""
    return kind_of(expanded(source)) is not None


def kind_of(folder: Path) -> Kind | None:
    """Return the kind of draft head in a folder or GGUF file; None if there is no head of a known kind or no such path.

    The kinds are "eagle3", "eagle" (EAGLE-1 and 2), "medusa", "mtp" and "dflash" (all block heads).
    """
    if has_mtp(folder):
        return "mtp"
    try:
        config = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    architectures = str(config.get("architectures")).lower()
    written = config.get("speculators_model_type")
    if "dflash_config" in config or written in _BLOCKS or any(name in architectures for name in _BLOCKS):
        return "dflash"
    if "eagle3" in architectures or written == "eagle3" or "draft_vocab_size" in config:
        return "eagle3"
    if (
        config.get("model_type") == "medusa"
        or "medusa" in architectures
        or any((folder / name).is_file() for name in OWN_HEADS)
    ):
        return "medusa"
    names = tensor_names(folder, config)
    if _has_mtp(config, names):
        return "mtp"
    if any(name.startswith(MEDUSA_PREFIX) for name in names):
        return "medusa"
    is_eagle = written == "eagle" or any(name.removeprefix("model.") in _FUSIONS for name in names)
    return "eagle" if is_eagle else None


def module_note(target: Path) -> str | None:
    """Return a sentence about the MTP module in a target's folder or GGUF file, for a user who does not draft with it.

    Returns None if there is no module.
    """
    if kind_of(target) == "mtp":
        return f"{shown(target)} has an MTP module, which is not used; `--drafter {target}` drafts with it"
    architecture = mtp_architecture(target)
    if architecture is None:
        return None
    return f"the MTP module in {shown(target)} is not used: modules of {architecture} in GGUF files are not supported"


def _has_mtp(config: dict[str, Any], names: list[str]) -> bool:
    """Return whether the checkpoint has an MTP module of a supported architecture."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    layers, found = text.get("num_hidden_layers"), MTP_NAMES.get(str(text.get("model_type")))
    return found is not None and isinstance(layers, int) and f"{found.with_layers(layers).projection}.weight" in names


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that a head would be loaded from."""
    try:
        return [file for file in head_files(folder) if file.suffix == ".safetensors"]
    except ArtifactError:  # reported when the head is loaded
        return []


def tensor_names(folder: Path, config: dict[str, Any]) -> list[str]:
    """Return the names in the headers of a head's safetensors files in ``folder``; unreadable files are skipped.

    If these have no name and ``config`` (the content of config.json) says one layer, as heads of EAGLE-1 do, the result
    is the tensor names in pytorch_model.bin, or an empty list if that file cannot be read without running code.
    """
    names: list[str] = []
    for file in _weight_files(folder):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                names += parse_json(stream.read(min(length, file.stat().st_size)))
        except (OSError, ValueError, struct.error):  # reported when the head is loaded
            continue
    pickled = folder / PICKLED_HEAD
    if not names and config.get("num_hidden_layers") == 1 and pickled.is_file():
        import torch  # takes a second, so it is imported only here

        try:
            names = list(torch.load(pickled, map_location="cpu", weights_only=True, mmap=True))
        except (OSError, RuntimeError, ValueError, TypeError, EOFError, pickle.UnpicklingError):
            return []
    return names
