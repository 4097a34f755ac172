"""Reads weights from memory-mapped safetensors files, to pack them without a second copy in memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from yggdrasil.checkpoints.formats.rows import PackedRows
from yggdrasil.checkpoints.gaps import is_ignored, refuse_gaps
from yggdrasil.checkpoints.packable import release


class MappedSafetensors:
    """The memory-mapped weights of a checkpoint folder, by name."""

    def __init__(
        self, folder: Path, name: str, shapes: Mapping[str, tuple[int, ...]], optional: str, num_draft_layers: int
    ) -> None:
        """Open the files of ``folder`` and check their tensors.

        Args:
            name: the model's name in error messages.
            shapes: expected shapes by weight name.
            optional: name of a weight of ``shapes`` that the folder may lack.
            num_draft_layers: number of layers for multi-token prediction after the model's layers; they are ignored.

        Raises:
            YggdrasilError: if a tensor is missing, unexpected or has another shape.
        """
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened: Any = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)
        self._mapped: dict[str, Tensor] = {}
        found = {key: tuple(opened.get_slice(key).get_shape()) for key, opened in self._files.items()}
        num_layers = len({key.split(".")[2] for key in shapes if key.startswith("model.layers.")})
        unexpected = [key for key in found.keys() - shapes.keys() if not is_ignored(key, num_layers, num_draft_layers)]
        misshapen = [
            f"{key} ({list(found[key])}, not {list(shape)})"
            for key, shape in sorted(shapes.items())
            if key in found and found[key] != shape
        ]
        refuse_gaps(name, sorted(shapes.keys() - found.keys() - {optional}), sorted(unexpected), misshapen)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def packed(self, name: str) -> PackedRows | None:
        """Return None: this reader has no weights in quantised blocks (``Mxfp4Experts`` reads those of MXFP4)."""
        return None

    def stop_packing(self) -> None:
        """Do nothing: no thread packs the weights of a safetensors file."""

    def values(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the weight ``name`` in ``dtype``, a view of the mapped file if ``dtype`` is the stored one."""
        self._mapped[name] = mapped = self._files[name].get_tensor(name)
        values: Tensor = mapped.to(dtype)
        return values

    def release(self, name: str) -> None:
        """Drop the memory pages of the mapped weight ``name``; a later access reads the file again."""
        mapped = self._mapped.pop(name, None)
        if mapped is not None:
            release(mapped)
