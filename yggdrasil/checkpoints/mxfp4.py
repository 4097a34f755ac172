"""Experts stored in MXFP4 in a checkpoint folder, as in the published gpt-oss models.

A weight [E, N, K] is stored as two uint8 tensors: blocks [E, N, K / 32, 16] of 32 inputs in 4 bits each, with adjacent
inputs in one byte, and one exponent per block [E, N, K / 32].
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
    """Return whether config.json in ``folder`` specifies MXFP4 quantisation."""
    try:
        config = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    quantised = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(quantised, dict) and quantised.get("quant_method") == _METHOD


class Mxfp4Experts:
    """Reader of the MXFP4 weights in a folder's safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened: Any = safe_open(file, framework="pt")
            self._files |= {name: opened for name in opened.keys() if name.endswith((BLOCKS, SCALES))}  # noqa: SIM118

    def part(self, name: str, weight: Tensor) -> QuantisedRows | None:
        """Return the experts' gate, up or down weight ``name`` [E, N, K] as GGUF blocks, or None if not MXFP4.

        ``weight`` is ignored.
        """
        stem = name.removesuffix(".weight")
        experts, _, part = stem.rpartition(".")
        if part in ("gate_proj", "up_proj"):  # stored interleaved
            rows = self._rows(f"{experts}.gate_up_proj")
            return (
                None
                if rows is None
                else QuantisedRows(rows.format, rows.blocks[:, part == "up_proj" :: 2].contiguous())
            )
        return self._rows(stem)

    def values(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Return the experts' parameter ``name`` dequantised, [E, K, N] in ``dtype``, or None if not MXFP4."""
        from gguf import GGMLQuantizationType, dequantize  # imported late: packed blocks do not need it

        rows = self._rows(name)
        if rows is None:
            return None
        numbers = dequantize(rows.blocks.numpy(), GGMLQuantizationType(rows.format))
        return torch.from_numpy(numbers).transpose(1, 2).to(dtype).contiguous()

    def _rows(self, name: str) -> QuantisedRows | None:
        """Read the weight ``name`` [E, N, K] as GGUF blocks of 17 bytes (exponent, 32 inputs); None if not MXFP4."""
        blocks, scales = f"{name}{BLOCKS}", f"{name}{SCALES}"
        if blocks not in self._files or scales not in self._files:
            return None
        halves = _in_halves(self._files[blocks].get_tensor(blocks))
        rows = torch.cat([self._files[scales].get_tensor(scales)[..., None], halves], dim=-1)
        return QuantisedRows(Format.MXFP4, rows.flatten(2).contiguous())


def _in_halves(blocks: Tensor) -> Tensor:
    """Reorder blocks [..., 16] uint8 so that byte i holds inputs i and i + 16 (as in GGUF), not 2i and 2i + 1."""
    values = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # [..., 32]
    return values[..., :16] | values[..., 16:] << 4
