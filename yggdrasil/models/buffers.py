"""Small inputs of compiled steps that the host writes: a tensor with a fixed address and a cheap way to fill it."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostBuffer:
    """An int64 tensor written from the host between steps.

    On a CPU the write goes straight to its memory; elsewhere it is staged in pinned memory and copied asynchronously.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor: Tensor = torch.zeros(size, dtype=torch.int64, device=device)
        staged = device.type != "cpu"
        self._staging = torch.zeros(size, dtype=torch.int64, pin_memory=True) if staged else self.tensor
        self._view = self._staging.numpy()
        self._is_staged = staged

    def write(self, *values: int) -> None:
        """Set the first entries."""
        self._view[: len(values)] = values
        if self._is_staged:
            self.tensor.copy_(self._staging, non_blocking=True)

    def write_sequence(self, values: Sequence[int]) -> None:
        """Set the first entries from a sequence."""
        self.write(*values)
