"""Which kind of head a folder holds, if it holds one: by its configuration, else by the names of its tensors."""

import pickle
import struct
from pathlib import Path
from typing import Any, Literal

from yggdrasil.artifacts import OWN_HEADS, PICKLED_HEAD, head_files, parse_json
from yggdrasil.artifacts.homes import expanded
from yggdrasil.drafters.heads.mtp.files import MTP_NAMES
from yggdrasil.errors import ArtifactError

Kind = Literal["eagle3", "eagle", "medusa", "mtp", "dflash"]

MEDUSA_PREFIX = "medusa_head."  # of heads that lie among their base model's tensors
_FUSIONS = ("fc.weight", "fusion_fc.weight")


def is_head(source: str) -> bool:
    """Whether a drafter's source is a folder with a head that is served."""
    return kind_of(expanded(source)) is not None


def kind_of(folder: Path) -> Kind | None:
    """The kind of head in ``folder``; None where it holds another drafter, or nothing that is known."""
    try:
        config = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    architectures = str(config.get("architectures")).lower()
    written = config.get("speculators_model_type")
    if "dflash_config" in config or written == "dflash":
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


def _has_mtp(config: dict[str, Any], names: list[str]) -> bool:
    """Whether a model brings a module for multi-token prediction, of a family that is served."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    layers, found = text.get("num_hidden_layers"), MTP_NAMES.get(str(text.get("model_type")))
    return found is not None and isinstance(layers, int) and f"{found.of(layers).projection}.weight" in names


def _weight_files(folder: Path) -> list[Path]:
    """What a head would be read from: a file that is not read tells nothing of the folder."""
    try:
        return [file for file in head_files(folder) if file.suffix == ".safetensors"]
    except ArtifactError:  # said when it is loaded
        return []


def tensor_names(folder: Path, config: dict[str, Any]) -> list[str]:
    """Names of the tensors in ``folder``; of a pickle only where ``config`` is of one layer, and of tensors alone."""
    names: list[str] = []
    for file in _weight_files(folder):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                names += parse_json(stream.read(min(length, file.stat().st_size)))
        except (OSError, ValueError, struct.error):  # said when it is loaded
            continue
    pickled = folder / PICKLED_HEAD
    if not names and config.get("num_hidden_layers") == 1 and pickled.is_file():
        import torch  # a second, for what is rare

        try:
            names = list(torch.load(pickled, map_location="cpu", weights_only=True, mmap=True))
        except (OSError, RuntimeError, ValueError, TypeError, EOFError, pickle.UnpicklingError):
            return []
    return names
