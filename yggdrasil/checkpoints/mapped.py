"""The weights of safetensors files where they lie: mapped, and read once on their way to packed layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from yggdrasil.checkpoints.formats.rows import QuantisedRows
from yggdrasil.checkpoints.gaps import is_ignored, refuse_gaps
from yggdrasil.checkpoints.packable import release


class MappedSafetensors:
    """A folder's weights by name."""

    def __init__(
        self, folder: Path, name: str, shapes: Mapping[str, tuple[int, ...]], optional: str, num_drafting: int
    ) -> None:
        """``name`` is what errors call it; ``optional`` is a weight of ``shapes`` that a folder may lack.

        YggdrasilError where tensors and ``shapes`` are not of one model; ``num_drafting`` are its drafting layers.
        """
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened: Any = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)
        self._mapped: dict[str, Tensor] = {}
        found = {key: tuple(opened.get_slice(key).get_shape()) for key, opened in self._files.items()}
        num_layers = len({key.split(".")[2] for key in shapes if key.startswith("model.layers.")})
        unexpected = [key for key in found.keys() - shapes.keys() if not is_ignored(key, num_layers, num_drafting)]
        misshapen = [
            f"{key} ({list(found[key])}, not {list(shape)})"
            for key, shape in sorted(shapes.items())
            if key in found and found[key] != shape
        ]
        refuse_gaps(name, sorted(shapes.keys() - found.keys() - {optional}), sorted(unexpected), misshapen)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def blocks(self, name: str) -> QuantisedRows | None:
        """None: nothing here is stored in blocks."""
        return None

    def values(self, name: str, dtype: torch.dtype) -> Tensor:
        """The weight in ``dtype``; where it is stored so, the mapped one until it is released."""
        self._mapped[name] = mapped = self._files[name].get_tensor(name)
        values: Tensor = mapped.to(dtype)
        return values

    def release(self, name: str) -> None:
        """Give up the memory of the mapped weight: a process holds the file's pages no longer than it reads them."""
        mapped = self._mapped.pop(name, None)
        if mapped is not None:
            release(mapped)
