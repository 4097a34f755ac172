"""Rotary tables: cosines and sines of every position that a step may read.

Dims: P positions, D head size.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_FIRST_ROWS = 512


class RotaryTable:
    """Cosines and sines [P, D] in ``dtype`` of P positions, the second half of each row equal to the first.

    Rows are computed up to the farthest position that was read, twice as many each time: a model may have 131,072
    positions, of which most texts read a few hundred.
    """

    def __init__(self, rope: Mapping[str, Any], size: int, positions: int, dtype: torch.dtype) -> None:
        self._frequencies, self._scale = frequencies(rope, size)
        with torch.inference_mode(False):  # rows are written later, in either mode
            self._cosines, self._sines = (torch.empty(positions, size, dtype=dtype) for _ in range(2))
        self._computed = 0

    def rows(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [W, D] of ``positions`` [W] int64, none of which is greater than ``last``."""
        if last >= self._computed:
            self._compute(max(last + 1, _FIRST_ROWS, 2 * self._computed))
        return self._cosines.index_select(0, positions), self._sines.index_select(0, positions)

    @torch.no_grad()
    def _compute(self, end: int) -> None:
        """Compute the rows before ``end``."""
        begin, end = self._computed, min(end, len(self._cosines))
        angles = torch.arange(begin, end, dtype=torch.int64).float()[:, None] * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        self._cosines[begin:end] = angles.cos() * self._scale
        self._sines[begin:end] = angles.sin() * self._scale
        self._computed = end


def frequencies(rope: Mapping[str, Any], size: int) -> tuple[Tensor, float]:
    """Radians a position of each pair of channels [D / 2], and what cosines and sines are multiplied by."""
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    shares = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    turns = 1.0 / (theta**shares)
    if kind == "linear":
        return turns / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(turns, rope), 1.0
    if kind == "longrope":  # of its first training's positions; longer texts are not served
        original = float(rope["original_max_position_embeddings"])
        factor = float(rope.get("factor") or float(rope["max_position_embeddings"]) / original)
        scale = rope.get("attention_factor")
        if scale is None:
            scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        short = torch.tensor(rope["short_factor"], dtype=torch.float32)
        return 1.0 / (short * theta**shares), float(scale)
    return turns, 1.0


def _llama3(turns: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Slow turns divided by a factor, fast ones left, those between mixed of both."""
    length = float(rope["original_max_position_embeddings"])
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    wavelengths = 2 * math.pi / turns
    slow = torch.where(wavelengths > length / low, turns / factor, turns)
    smooth = (length / wavelengths - low) / (high - low)
    mixed = (1 - smooth) * slow / factor + smooth * slow
    is_between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
    return torch.where(is_between, mixed, slow)
