"""Read the tensors of a head's folder, and report damaged or unexpected ones.

A matrix [R, C] may be stored in six bits: NAME is a packed column (``artifacts.columns``) of R * C numbers from 1 to 63
with 32 for zero, row by row, and NAME_scale the value of one step, float16 [R, C / 64], for each 64 weights of a row.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from yggdrasil.artifacts import OWN_HEADS, PICKLED_HEAD, head_files, shown
from yggdrasil.artifacts.columns import pack_column, unpack_column
from yggdrasil.errors import YggdrasilError, first_line, listed

_SCALE = "_scale"
_IN_FULL = ".e_score_correction_bias"  # float32 whatever the weights are, as transformers keeps it
_ZERO, _GROUP = 32, 64


def read_tensors(folder: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """Return, by name, the tensors of a head's ``folder`` whose names begin with one of ``prefixes`` (default: all).

    The files are safetensors, or a pickle that holds only tensors (loaded with ``weights_only``). Matrices stored in
    six bits are dequantised to float32.

    Raises:
        YggdrasilError: there are no files, or a file is damaged or holds other objects than tensors.
    """
    from safetensors import SafetensorError, safe_open

    files = head_files(folder)
    if not files:
        raise YggdrasilError(
            f"{shown(folder)} holds no *.safetensors, nor {PICKLED_HEAD} or {OWN_HEADS[1]}; fetch the head again"
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
                chosen = [name for name in loaded if name.startswith(prefixes)]
                tensors |= {name: loaded[name] for name in chosen}
                if not all(isinstance(loaded[name], Tensor) for name in chosen):
                    raise TypeError("it holds other things than tensors")
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, EOFError) as error:
            raise YggdrasilError(f"{shown(file)} could not be read: {first_line(error)}; fetch it again") from error
        except Exception as error:  # errors of the restricted unpickler have no common class
            raise YggdrasilError(
                f"{shown(file)} holds more than tensors, which may be code: {first_line(error)}"
            ) from error
    return _in_full_precision(folder, tensors)


def in_six_bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantise to six bits every floating-point matrix whose row length is a multiple of 64; keep other tensors.

    Returns the tensors to store, by name: for each quantised matrix, NAME (uint8, packed) and NAME_scale (float16).
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.is_floating_point() or tensor.shape[1] % _GROUP:
            stored[name] = tensor
            continue
        groups = tensor.float().view(len(tensor), -1, _GROUP)
        scale = (groups.abs().amax(dim=2) / (_ZERO - 1)).clamp_min(torch.finfo(torch.float16).tiny).half()
        steps = (groups / scale.float()[:, :, None]).round().clamp(1 - _ZERO, _ZERO - 1).to(torch.int64) + _ZERO
        stored[name] = torch.from_numpy(pack_column(steps.flatten().numpy()).copy())
        stored[name + _SCALE] = scale
    return stored


def _in_full_precision(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` with matrices stored in six bits dequantised to float32, and without their scales."""
    scales = {name: tensors.pop(name) for name in sorted(tensors) if name.endswith(_SCALE)}
    for name, scale in scales.items():
        packed = tensors.get(name.removesuffix(_SCALE))
        try:
            if packed is None or packed.dtype != torch.uint8:
                raise ValueError("no packed matrix of that name")
            steps = torch.from_numpy(unpack_column(packed.numpy(), np.int64) - _ZERO).view(*scale.shape, _GROUP)
        except (ValueError, RuntimeError) as error:
            raise YggdrasilError(f"{shown(folder)} holds {name}, but {first_line(error)}; fetch it again") from error
        tensors[name.removesuffix(_SCALE)] = (steps.float() * scale.float()[:, :, None]).flatten(1)
    return tensors


def under_our_names(folder: Path, tensors: dict[str, Tensor], ours: Callable[[str], str]) -> dict[str, Tensor]:
    """Return ``tensors`` with each name mapped by the function ``ours``.

    Args:
        folder: the head's folder, for error messages.

    Raises:
        YggdrasilError: two names map to the same name.
    """
    names: dict[str, str] = {}
    for name in tensors:
        if names.setdefault(ours(name), name) != name:
            raise YggdrasilError(
                f"{shown(folder)} holds {names[ours(name)]} and {name}, which are one tensor in two spellings; fetch "
                "the head again"
            )
    return {own: tensors[name] for own, name in names.items()}


def refuse_others(
    folder: Path,
    tensors: dict[str, Tensor],
    head: nn.Module,
    more: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Check that ``tensors`` have exactly the names and shapes of the tensors of ``head`` and of ``more``.

    If neither ``head`` nor ``more`` has d2t, it is removed from ``tensors``: some files have a d2t of zeros.

    Args:
        folder: the head's folder, for error messages.
        more: further names of tensors with their shapes; None if there are no further tensors.

    Raises:
        YggdrasilError: tensors are missing, unexpected or of another shape; the message lists up to three of each.
    """
    expected = {**{name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}, **(more or {})}
    if "d2t" not in expected:
        tensors.pop("d2t", None)  # some files have a d2t of zeros although both vocabularies are equal
    misshapen = [
        f"{name} ({list(tensors[name].shape)}, not {list(shape)})"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    faults = (("lacks", missing), ("holds, beyond what a head has,", extra), ("has misshapen", misshapen))
    said = [f"{verb} {listed(names)}" for verb, names in faults if names]
    if said:
        raise YggdrasilError(
            f"{shown(folder)} {' and '.join(said)}: its tensors are not those of its config.json; fetch the head again"
        )


def fill(head: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Load ``tensors`` into ``head``, which may be on the meta device, in ``dtype``, and set it to inference.

    ``d2t`` keeps its dtype, and the correction biases of a router of experts become float32.

    Raises:
        RuntimeError: names or shapes differ from those of ``head``.
    """
    kinds = {name: torch.float32 if name.endswith(_IN_FULL) else dtype for name in tensors}
    weights = {name: tensor if name == "d2t" else tensor.to(kinds[name]) for name, tensor in tensors.items()}
    head.load_state_dict(weights, assign=True)
    head.eval().requires_grad_(False)


def drafted_tokens(folder: Path, name: str, table: Tensor, vocab_size: int, *, are_offsets: bool = False) -> Tensor:
    """Return a head's draft vocabulary, [Vd] int64 distinct token ids of the target, from the tensor ``table`` [Vd].

    Args:
        folder: the head's folder, for error messages.
        name: name of the tensor, for error messages.
        are_offsets: entry i of ``table`` is the i-th token id minus i; False: the token id.

    Raises:
        YggdrasilError: ``table`` is empty or holds other values than integers, or a token occurs twice or is outside
            the target's vocabulary.
    """
    tokens = table.to(torch.int64)
    if not tokens.numel() or not bool((tokens == table).all()):
        raise YggdrasilError(f"{shown(folder)}: {name} holds other things than tokens; fetch the head again")
    tokens = tokens + torch.arange(len(tokens)) if are_offsets else tokens
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size or len(tokens.unique()) != len(tokens):
        raise YggdrasilError(
            f"{shown(folder)}: {name} names tokens twice or outside the target's {vocab_size}; fetch it again"
        )
    return tokens
