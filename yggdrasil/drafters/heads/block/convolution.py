"""DFlash2's convolution over the rows of a block, around attention and around the feed-forward layer.

Dims: W rows of a block, H hidden size, G groups of channels, T taps.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class BlockConvolution(nn.Module):
    """Convolution in which each output row is a weighted sum of its input row and the T - 1 rows before in the block.

    Each weight is the sum of a fixed weight per channel and a weight per group of channels that is projected from the
    row.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))  # before and after the layer
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group_size), bias=False)
        self._taps, self._group_size = taps, group_size

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the input of an attention or feed-forward layer over the rows of a block.

        Args:
            x: [.., W, H] inputs of the layer.

        Returns:
            The convolved input [.., W, H], and the weights [.., W, T, G] with which ``after`` convolves the layer's
                output.
        """
        weights = self.kernel_projection(x).unflatten(-1, (2, self._taps, -1))
        return self._convolved(x, self.base_kernel[0], weights[..., 0, :, :]), weights[..., 1, :, :]

    def after(self, x: Tensor, weights: Tensor) -> Tensor:
        """Convolve a layer's output ``x`` [.., W, H] with the ``weights`` [.., W, T, G] that ``before`` returned."""
        return self._convolved(x, self.base_kernel[1], weights)

    def _convolved(self, x: Tensor, base: Tensor, weights: Tensor) -> Tensor:
        rows = x.unflatten(-1, (-1, self._group_size))
        total = torch.zeros_like(rows)
        for tap in range(self._taps):
            earlier = functional.pad(rows[..., : rows.shape[-3] - tap, :, :], (0, 0, 0, 0, tap, 0))
            total = total + (base[tap].unflatten(-1, (-1, self._group_size)) + weights[..., tap, :, None]) * earlier
        return total.flatten(-2)
