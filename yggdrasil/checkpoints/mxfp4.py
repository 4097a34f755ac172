"""Experts that a checkpoint folder stores in MXFP4, as gpt-oss is published: tensors of blocks and of their scales.

A block holds 32 inputs in 4 bits each; two tensors of a weight [E, N, K] are its blocks [E, N, K / 32, 16], neighbours
in one byte, and their exponents [E, N, K / 32].
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from yggdrasil.artifacts import parse_json
from yggdrasil.checkpoints.formats.kinds import Format
from yggdrasil.checkpoints.formats.rows import QuantisedRows

BLOCKS, SCALES = "_blocks", "_scales"
_METHOD = "mxfp4"


def holds_mxfp4(folder: Path) -> bool:
    """Whether the configuration in ``folder`` says that its experts are stored so."""
    try:
        config = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    quantised = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(quantised, dict) and quantised.get("quant_method") == _METHOD


class Mxfp4Experts:
    """The experts' weights of a folder, where they lie."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened: Any = safe_open(file, framework="pt")
            self._files |= {name: opened for name in opened.keys() if name.endswith((BLOCKS, SCALES))}  # noqa: SIM118

    def part(self, name: str, weight: Tensor) -> QuantisedRows | None:
        """The gate, up or down weight called ``name`` as rows of GGUF's blocks; None of another weight."""
        stem = name.removesuffix(".weight")
        experts, _, part = stem.rpartition(".")
        if part in ("gate_proj", "up_proj"):  # in turns
            rows = self._rows(f"{experts}.gate_up_proj")
            return (
                None
                if rows is None
                else QuantisedRows(rows.format, rows.blocks[:, part == "up_proj" :: 2].contiguous())
            )
        return self._rows(stem)

    def values(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The parameter called ``name``, [E, K, N], as numbers; None of another."""
        from gguf import GGMLQuantizationType, dequantize  # here: blocks that stay need no such package

        rows = self._rows(name)
        if rows is None:
            return None
        numbers = dequantize(rows.blocks.numpy(), GGMLQuantizationType(rows.format))
        return torch.from_numpy(numbers).transpose(1, 2).to(dtype).contiguous()

    def _rows(self, name: str) -> QuantisedRows | None:
        blocks, scales = f"{name}{BLOCKS}", f"{name}{SCALES}"
        if blocks not in self._files or scales not in self._files:
            return None
        halves = _in_halves(self._files[blocks].get_tensor(blocks))
        rows = torch.cat([self._files[scales].get_tensor(scales)[..., None], halves], dim=-1)
        return QuantisedRows(Format.MXFP4, rows.flatten(2).contiguous())


def _in_halves(blocks: Tensor) -> Tensor:
    """Blocks [..., 16] whose bytes hold neighbours as blocks whose bytes hold an input of each half (GGUF's)."""
    values = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # [..., 32]
    return values[..., :16] | values[..., 16:] << 4
