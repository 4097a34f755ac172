"""Pad a head as its target was padded: it drafts what it drafted, at the costs of a head of the wide target.

As in the model nothing new ever reaches what a row hands on; all other new weights are random.
"""

import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widening import ModelShape, read_shape
from widening.layout import Layout, scaled, widened
from yggdrasil.artifacts import atomic_directory, parse_json, shown
from yggdrasil.checkpoints.shards import raising_os_errors
from yggdrasil.drafters.heads.eagle.config import CONVENTION, HeadSettings
from yggdrasil.drafters.heads.eagle.eagle3 import EagleHead
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.kinds import kind_of
from yggdrasil.drafters.heads.medusa.files import open_medusa
from yggdrasil.drafters.heads.medusa.module import MedusaHeads
from yggdrasil.errors import YggdrasilError

_USUAL = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps")


def widen_head(head: Path, target: Path, out: Path, seed: int = 0) -> int:
    """Write ``head`` for ``target``, a folder of ``widen_checkpoint``; returns its number of parameters.

    Raises:
        YggdrasilError: ``out`` holds something, ``target`` was not widened, or the head is no EAGLE-3 or Medusa head,
            or another model's.
    """
    from safetensors.torch import save_file

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise YggdrasilError(f"--out {shown(out)} already exists and is not an empty folder; give another")
    narrow, wide, kind = _widened_from(target), read_shape(target), kind_of(head)
    opened = open_medusa(head, torch.float32) if kind == "medusa" else open_head(head, torch.float32)[0]
    config = parse_json((head / "config.json").read_bytes())
    settings = opened.settings
    if (settings.hidden_size, settings.vocab_size) != (narrow.hidden_size, wide.vocab_size):
        raise YggdrasilError(
            f"{shown(head)} reads states of {settings.hidden_size} channels and {settings.vocab_size} tokens, "
            f"{shown(target)} was widened from {narrow.hidden_size} and has {wide.vocab_size} tokens"
        )
    generator = torch.Generator().manual_seed(seed)
    if isinstance(opened, MedusaHeads):
        tensors = _wide_medusa(opened, Layout.between(narrow, wide, 0), generator)
        config = {**config, "hidden_size": wide.hidden_size}
    elif isinstance(opened, EagleHead) and _is_plain(opened.settings, config):
        tensors = _wide_tensors(opened, wide, generator)
        config = _wide_config(config, opened.settings, narrow, wide)
    else:
        raise YggdrasilError(
            f"{shown(head)} is no EAGLE-3 or Medusa head as EAGLE, vLLM and `yggdrasil train` write it"
        )
    with atomic_directory(out) as folder, raising_os_errors():
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())


def _widened_from(target: Path) -> ModelShape:
    try:
        return ModelShape(**parse_json((target / "widening.json").read_bytes())["widened_from"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise YggdrasilError(f"{shown(target)} was not written by scripts/widen: no widening.json says so") from error


def _is_plain(settings: HeadSettings, config: dict[str, Any]) -> bool:
    has_more = (
        settings.attention_bias, settings.mlp_bias, settings.qkv_bias, settings.norm_before_residual,
        settings.norm_before_fc, settings.fc_norm, settings.norm_output, settings.window, settings.head_norms,
    )  # fmt: skip
    return "hidden_size" in config and settings.target_hidden_size == settings.hidden_size and not any(has_more)


def _wide_tensors(head: EagleHead, wide: ModelShape, generator: torch.Generator) -> dict[str, Tensor]:
    settings, count = head.settings, head.settings.num_states
    narrow = ModelShape(
        settings.hidden_size, 1, settings.query_heads, settings.key_heads, settings.head_size,
        settings.intermediate_size, settings.vocab_size,
    )  # fmt: skip
    if any(own > room for own, room in zip(astuple(narrow), astuple(wide), strict=True)):
        raise YggdrasilError(f"the head is larger than the wide target: {narrow} is more than {wide}; widen it further")
    layout = Layout.between(narrow, replace(wide, num_layers=1), 0)
    read, written = layout.output_head[1], layout.embedding[1]
    axes = {f"midlayer.{module}": placed for module, placed in layout.axes.items()}
    axes["fc"] = written, _side_by_side(read, count, narrow.hidden_size)
    axes["lm_head"] = torch.arange(settings.draft_vocab_size), read
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        module = name.removesuffix(".weight")
        if name == "d2t":
            drafted = torch.arange(len(tensor)) + tensor
            tensors |= {name: tensor, "t2d": torch.zeros(narrow.vocab_size, dtype=torch.bool)}
            tensors["t2d"][drafted] = True
        elif module.endswith("norm"):
            tensors[name] = widened(scaled(tensor, layout.norm_scale), (read, read[:1]), generator)
        else:
            rows, columns = axes[module]
            if module.endswith(("q_proj", "k_proj", "v_proj")):
                columns = _side_by_side(columns, 2, narrow.hidden_size)
            factor = layout.query_scale if module.endswith("q_proj") else 1.0
            tensors[name] = widened(scaled(tensor.bfloat16(), factor), (rows, columns), generator)
    return tensors


def _wide_medusa(heads: MedusaHeads, layout: Layout, generator: torch.Generator) -> dict[str, Tensor]:
    read, written = layout.output_head[1], layout.embedding[1]
    tensors: dict[str, Tensor] = {}
    for name, tensor in heads.state_dict().items():
        if name == "d2t":
            tensors["token_map"] = tensor + torch.arange(len(tensor))
        else:
            rows = written if name.startswith("blocks.") else torch.arange(len(tensor))
            tensors[name] = widened(tensor.bfloat16(), (rows, read), generator)
    return tensors


def _side_by_side(axis: Tensor, count: int, size: int) -> Tensor:
    """``count`` parts of an input that are each padded, of ``size`` channels before."""
    return torch.cat([torch.where(axis >= 0, axis + part * size, axis) for part in range(count)])


def _wide_config(
    config: dict[str, Any], settings: HeadSettings, narrow: ModelShape, wide: ModelShape
) -> dict[str, Any]:
    """The head's config.json with the new dimensions; layers are numbered by their inputs."""
    values = (
        wide.hidden_size, wide.num_heads, wide.num_kv_heads, wide.intermediate_size,
        settings.norm_eps * settings.hidden_size / wide.hidden_size,
    )  # fmt: skip
    written = dict(config) | dict(zip(_USUAL, values, strict=True)) | {"head_dim": wide.head_dim}
    inputs = [layer + 1 for layer in settings.readings(narrow.num_layers)[0]]
    first_copies = [layer * wide.num_layers // narrow.num_layers for layer in inputs]
    return written | {"eagle_aux_hidden_state_layer_ids": first_copies, CONVENTION: "inputs"}
