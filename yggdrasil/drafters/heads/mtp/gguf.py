"""Read the MTP module of a GGUF file. llama.cpp stores the module after the model's layers, with ``nextn`` tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from yggdrasil.artifacts.gguf import is_gguf, read_gguf_layout
from yggdrasil.checkpoints.gguf.recurrent import as_in_model
from yggdrasil.checkpoints.gguf.values import values_of
from yggdrasil.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")
_AROUND = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head_norm"}
_EXPERTS = {"mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.down_proj": ("ffn_down_exps",)}


def has_mtp(path: Path) -> bool:
    """Return whether ``path`` is a GGUF file with an MTP module of a supported architecture."""
    return mtp_architecture(path) in _ARCHITECTURES


def mtp_architecture(path: Path) -> str | None:
    """Return the architecture of a GGUF file with an MTP module, supported or not; None for other files."""
    if not is_gguf(path):
        return None
    try:
        header = read_gguf_layout(path)
    except ArtifactError:  # reported when the target is loaded
        return None
    has_projection = any(name.endswith(".nextn.eh_proj.weight") for name in header.tensors)
    return header.architecture if has_projection else None


def mtp_tensors(path: Path, config: "PretrainedConfig", shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the MTP module in the GGUF file ``path``, dequantised to float32, by ``MtpHead``'s names.

    Tensors that the file lacks are missing in the result.

    Args:
        config: the target's text configuration.
        shapes: all tensors of the ``MtpHead``, by name; only their shapes are read.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    header, layer = read_gguf_layout(path), int(config.num_hidden_layers)
    kind = next(key for key, value in MODEL_ARCH_NAMES.items() if value == header.architecture)
    table = get_tensor_name_map(kind, layer + 1)
    tensors: dict[str, Tensor] = {}
    for name, shaped in shapes.items():
        stem, _, suffix = name.rpartition(".")
        own = name.removeprefix("block.")
        if stem in _AROUND:
            theirs = [f"blk.{layer}.nextn.{_AROUND[stem]}.{suffix}"]
        elif own in _EXPERTS:
            theirs = [f"blk.{layer}.{part}.weight" for part in _EXPERTS[own]]
        else:
            written = table.get_name(f"model.layers.{layer}.{own.rpartition('.')[0]}")
            theirs = [f"{written}.{suffix}"]
        if all(part in header.tensors for part in theirs):
            values = [
                as_in_model(header.architecture, config, part, values_of(header, header.tensors[part]))
                for part in theirs
            ]
            found = torch.from_numpy(np.concatenate(values, axis=-2) if len(values) > 1 else values[0].copy())
            is_vector = found.numel() == max(shaped.shape)  # a gate of one row may be a vector in the file
            tensors[name] = found.reshape(shaped.shape) if is_vector else found
    return tensors
