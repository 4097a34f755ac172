"""Tables of the cosines and sines of rotary embeddings.

Dims: P positions, D head size.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_FIRST_ROWS = 512


class RotaryTable:
    """Cosines and sines [P, D] in ``dtype`` for P positions; the second half of each row equals the first.

    Rows are computed when first needed, doubling their number each time: a model may have 131,072 positions, of which
    most texts use a few hundred.
    """

    def __init__(self, rope: Mapping[str, Any], size: int, positions: int, dtype: torch.dtype) -> None:
        self._frequencies, self._scale = frequencies(rope, size)
        with torch.inference_mode(False):  # rows are written later, in either mode
            self._cosines, self._sines = (torch.empty(positions, size, dtype=dtype) for _ in range(2))
        self._computed = 0

    def rows(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines, [W, D] each, of the positions [W] int64.

        ``last`` is at least the largest position; the caller passes it to save a read of ``positions``.
        """
        if last >= self._computed:
            self._compute(max(last + 1, _FIRST_ROWS, 2 * self._computed))
        return self._cosines.index_select(0, positions), self._sines.index_select(0, positions)

    @torch.no_grad()
    def _compute(self, end: int) -> None:
        """Compute the missing rows before position ``end``."""
        begin, end = self._computed, min(end, len(self._cosines))
        angles = torch.arange(begin, end, dtype=torch.int64).float()[:, None] * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        self._cosines[begin:end] = angles.cos() * self._scale
        self._sines[begin:end] = angles.sin() * self._scale
        self._computed = end


def frequencies(rope: Mapping[str, Any], size: int) -> tuple[Tensor, float]:
    """Return the frequencies [D / 2] float32 of a rotary embedding, in radians per position, and a factor.

    Cosines and sines are multiplied by the factor. ``rope`` are transformers' ``rope_parameters``, ``size`` is D.
    """
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    shares = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    turns = 1.0 / (theta**shares)
    if kind == "linear":
        return turns / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(turns, rope), 1.0
    if kind == "longrope":  # factors for the original context; longer texts are not supported
        original = float(rope["original_max_position_embeddings"])
        factor = float(rope.get("factor") or float(rope["max_position_embeddings"]) / original)
        scale = rope.get("attention_factor")
        if scale is None:
            scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        short = torch.tensor(rope["short_factor"], dtype=torch.float32)
        return 1.0 / (short * theta**shares), float(scale)
    if kind == "yarn":
        return _yarn(turns, rope)
    return turns, 1.0


def _yarn(turns: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Divide low frequencies by a factor, keep high ones, interpolate between (YaRN); return the factor of tables."""
    length, size = float(rope["original_max_position_embeddings"]), 2 * len(turns)
    factor = float(rope.get("factor") or rope["max_position_embeddings"] / length)

    def grown(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention, scales = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if attention is None:
        attention = grown(scales[0]) / grown(scales[1]) if scales[0] and scales[1] else grown()
    theta = float(rope["rope_theta"])
    low, high = (
        size * math.log(length / (float(rope.get(name) or usual) * 2 * math.pi)) / (2 * math.log(theta))
        for name, usual in (("beta_fast", 32), ("beta_slow", 1))
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(len(turns)).float() - low) / (high - low if high != low else 0.001)
    share = 1 - ramp.clamp(0, 1)  # of the kept frequency
    return turns / factor * (1 - share) + turns * share, float(attention)


def _llama3(turns: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Scale frequencies by Llama 3's rule: divide low ones by a factor, keep high ones, interpolate between."""
    length = float(rope["original_max_position_embeddings"])
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    wavelengths = 2 * math.pi / turns
    slow = torch.where(wavelengths > length / low, turns / factor, turns)
    smooth = (length / wavelengths - low) / (high - low)
    mixed = (1 - smooth) * slow / factor + smooth * slow
    is_between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
    return torch.where(is_between, mixed, slow)
