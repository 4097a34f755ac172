"""A copy of a head in 8 bits, and how far off its outputs may be: what ``bounded_argmax`` reads in the head's place.

Dims: N outputs, K inputs, P panels of 16 outputs.
"""

import torch
from torch import Tensor

from yggdrasil.native import is_native
from yggdrasil.native.arena import Arena

_LEAST_BYTES = 1 << 24  # of a head; a smaller one stays in a processor's caches, and a copy would gain nothing
_PANEL, _TILE, _MOST = 16, 64, 127  # outputs of a panel, inputs of a tile, the greatest multiple that a byte holds
_PANELS_AT_ONCE = 256  # in double precision a whole head would take more memory than a model
_SURELY = 1 + 1e-6  # for what float32 takes from norms


def pays_a_copy(weight: Tensor) -> bool:
    """Whether the processor multiplies bytes, and ``weight`` [N, K] is large enough; its numbers must be finite."""
    has_byte_products = is_native() and torch.ops.yggdrasil.has_byte_products()
    return has_byte_products and weight.nbytes >= _LEAST_BYTES and bool(torch.stack(weight.aminmax()).isfinite().all())


def copy_of(weight: Tensor, arena: Arena) -> tuple[Tensor, Tensor]:
    """The copy of ``weight`` [N, K] and its factors.

    The copy [P, K / 4, 16, 4] uint8 holds multiples of a scale an output, 128 added, K filled to whole tiles of 64. The
    factors [P, 3, 16] float32 are those scales, the norms of what was lost of each output's weights, and of what is
    left.
    """
    panels, inputs = -(-weight.shape[0] // _PANEL), -(-weight.shape[1] // _TILE) * _TILE
    copy = arena.zeros((panels, inputs // 4, _PANEL, 4), torch.uint8)
    factors = torch.empty(panels, 3, _PANEL)
    for first in range(0, panels, _PANELS_AT_ONCE):
        some = slice(first, min(first + _PANELS_AT_ONCE, panels))
        _write_panels(weight[some.start * _PANEL : some.stop * _PANEL], copy[some], factors[some])
    return copy, factors


def _write_panels(weight: Tensor, copy: Tensor, factors: Tensor) -> None:
    """Write the panels of some outputs of ``weight`` [n, K]; where a panel has no output, nothing is known of it."""
    values = weight.double()
    scale = (values.abs().amax(dim=1, keepdim=True) / _MOST).float().clamp(min=torch.finfo(torch.float32).tiny).double()
    multiples = (values / scale).round().clamp(-_MOST, _MOST)
    left = multiples * scale
    rows, inputs = copy.shape[0] * _PANEL, copy.shape[1] * 4
    filled = torch.full((rows, inputs), 128, dtype=torch.uint8)
    filled[: len(values), : values.shape[1]] = (multiples + 128).to(torch.uint8)
    copy.copy_(filled.view(-1, _PANEL, inputs // 4, 4).transpose(1, 2))
    # Units take numbers below the least normal one for zero.
    lost = (values - left).norm(dim=1) + torch.finfo(torch.float32).tiny * values.shape[1] ** 0.5
    known = torch.stack([scale[:, 0], lost * _SURELY, left.norm(dim=1) * _SURELY])
    unknown = torch.tensor([[1.0], [torch.inf], [torch.inf]]).expand(3, rows - len(values))
    factors.copy_(torch.cat([known.float(), unknown], dim=1).view(3, -1, _PANEL).transpose(0, 1))
