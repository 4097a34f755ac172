"""An 8-bit copy of an LM head with error bounds, which ``bounded_argmax`` reads instead of the full head.

Dims: N outputs, K inputs, P panels of 16 outputs.
"""

import torch
from torch import Tensor

from yggdrasil.native import is_native
from yggdrasil.native.arena import Arena

_LEAST_BYTES = 1 << 24  # least size of a head: a smaller one fits the processor's caches, and a copy gains nothing
_PANEL, _TILE, _MOST = 16, 64, 127  # outputs per panel, inputs per tile, largest multiple stored in a byte
_PANELS_AT_ONCE = 256  # the whole head in float64 would take more memory than the model
_SURELY = 1 + 1e-6  # covers the rounding of norms to float32


def is_copy_faster(weight: Tensor) -> bool:
    """Return whether an 8-bit copy of the LM head ``weight`` [N, K] speeds up the argmax of its outputs.

    The result is True if the native library is loaded and multiplies bytes by integer instructions, the weight has at
    least 16 MiB, and all its values are finite.
    """
    has_byte_products = is_native() and torch.ops.yggdrasil.has_byte_products()
    return has_byte_products and weight.nbytes >= _LEAST_BYTES and bool(torch.stack(weight.aminmax()).isfinite().all())


def copy_in_8_bits(weight: Tensor, arena: Arena) -> tuple[Tensor, Tensor]:
    """Return a copy of the LM head ``weight`` [N, K] in 8 bits, and factors that bound its errors.

    The copy [P, K / 4, 16, 4] uint8 holds multiples, plus 128, of one scale per output; K is padded to a multiple of
    64. The factors [P, 3, 16] float32 are, per output, the scale, the norm of the rounding error, and the norm of the
    quantised weights.
    """
    panels, inputs = -(-weight.shape[0] // _PANEL), -(-weight.shape[1] // _TILE) * _TILE
    copy = arena.zeros((panels, inputs // 4, _PANEL, 4), torch.uint8)
    factors = torch.empty(panels, 3, _PANEL)
    for first in range(0, panels, _PANELS_AT_ONCE):
        some = slice(first, min(first + _PANELS_AT_ONCE, panels))
        _write_panels(weight[some.start * _PANEL : some.stop * _PANEL], copy[some], factors[some])
    return copy, factors


def _write_panels(weight: Tensor, copy: Tensor, factors: Tensor) -> None:
    """Write panels of ``weight`` [n, K] to ``copy`` and ``factors``; outputs beyond n get infinite norms."""
    values = weight.double()
    scale = (values.abs().amax(dim=1, keepdim=True) / _MOST).float().clamp(min=torch.finfo(torch.float32).tiny).double()
    multiples = (values / scale).round().clamp(-_MOST, _MOST)
    left = multiples * scale
    rows, inputs = copy.shape[0] * _PANEL, copy.shape[1] * 4
    filled = torch.full((rows, inputs), 128, dtype=torch.uint8)
    filled[: len(values), : values.shape[1]] = (multiples + 128).to(torch.uint8)
    copy.copy_(filled.view(-1, _PANEL, inputs // 4, 4).transpose(1, 2))
    # Hardware may flush subnormal numbers to zero.
    lost = (values - left).norm(dim=1) + torch.finfo(torch.float32).tiny * values.shape[1] ** 0.5
    known = torch.stack([scale[:, 0], lost * _SURELY, left.norm(dim=1) * _SURELY])
    unknown = torch.tensor([[1.0], [torch.inf], [torch.inf]]).expand(3, rows - len(values))
    factors.copy_(torch.cat([known.float(), unknown], dim=1).view(3, -1, _PANEL).transpose(0, 1))
