"""The tensors in a head's folder, and what is wrong with them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yggdrasil.artifacts import shown
from yggdrasil.drafters.heads.kinds import PICKLES
from yggdrasil.errors import YggdrasilError, first_line


def read_tensors(folder: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """The tensors of the folder by name, of those that begin with one of ``prefixes``.

    From safetensors, or from a pickle of nothing but tensors.

    Raises:
        YggdrasilError: there are no files, or one is damaged or holds more than tensors.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors")) or [folder / name for name in PICKLES if (folder / name).is_file()]
    if not files:
        raise YggdrasilError(
            f"{shown(folder)} holds no *.safetensors, nor {' or '.join(PICKLES)}; fetch the head again"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    chosen = [name for name in opened.keys() if name.startswith(prefixes)]  # noqa: SIM118
                    tensors |= {name: opened.get_tensor(name) for name in chosen}
            else:
                loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
                tensors |= {name: tensor for name, tensor in loaded.items() if name.startswith(prefixes)}
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, EOFError) as error:
            raise YggdrasilError(f"{shown(file)} could not be read: {first_line(error)}; fetch it again") from error
        except Exception as error:  # an unpickler's own refusals share no class
            raise YggdrasilError(
                f"{shown(file)} holds more than tensors, which may be code: {first_line(error)}"
            ) from error
    return tensors


def refuse_others(folder: Path, tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    """Refuse, by name, tensors that are missing, too many or of another shape than ``expected``."""
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


def check_vocabulary(folder: Path, table: Tensor, vocab_size: int) -> None:
    """Refuse a table of drafted tokens that names one twice or one that there is not."""
    tokens = table + torch.arange(len(table))
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size or len(tokens.unique()) != len(tokens):
        raise YggdrasilError(
            f"{shown(folder)}: d2t names tokens twice or outside the target's {vocab_size}; fetch it again"
        )
