"""Read the rotary embedding of a head from its configuration."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from yggdrasil.runtime.native_steps.call import frequencies

USUAL_THETA = 10000.0  # the default, as in transformers; the target's value is not inherited


def rope_of(layer: Mapping[str, Any], head_size: int) -> dict[str, Any]:
    """Return a head's rotary parameters: ``rope_type``, ``rope_theta`` (default 10000) and scaling parameters.

    Args:
        layer: configuration of the head's layer, as in config.json.
        head_size: channels of an attention head.

    Raises:
        ValueError: the parameters are unsupported or not numbers.
    """
    name = "rope_parameters" if layer.get("rope_parameters") else "rope_scaling"
    found = dict(section_of(layer, name))
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    found.setdefault("rope_theta", layer.get("rope_theta") or USUAL_THETA)
    partial = found.pop("partial_rotary_factor", None) or 1.0
    if any(isinstance(value, Mapping) for value in found.values()):
        raise ValueError(f"{name} differs by layer type, and a head has one layer")
    if found["rope_type"] not in ("default", "linear", "llama3"):
        raise ValueError(f"rotary positions of type {found['rope_type']!r} are not served")
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor is {partial}")
    try:
        turns = rotary_turns(found, head_size)
    except KeyError as error:
        raise ValueError(f"{name} lacks {error}") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{name} holds what is no number: {error}") from error
    if not bool(turns.isfinite().all()):
        raise ValueError(f"{name} makes no rotary positions: {found}")
    return found


def rotary_turns(rope: Mapping[str, Any], size: int) -> Tensor:
    """Return the angle in radians by which each pair of channels rotates per position, [size / 2] float32.

    Args:
        rope: ``rope_type`` ("default", "linear" or "llama3"), ``rope_theta`` and the type's scaling parameters.
        size: channels of an attention head.
    """
    with torch.device("cpu"):  # heads are created on the meta device, and no file has this tensor
        return frequencies(rope, size)[0]


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the mapping at ``config[name]``; an empty one if it is missing or null.

    Raises:
        ValueError: the value is not a mapping.
    """
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} is {found!r}, not a mapping")
    return found
