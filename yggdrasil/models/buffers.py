"""Small tensors with fixed addresses that steps and the host share: cheap ways to fill and to read them."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
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


class HostView:
    """What a tensor that is only written in place holds now: its own memory on a CPU, elsewhere a copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._view: npt.NDArray[Any] | None = tensor.numpy() if tensor.device.type == "cpu" else None

    def read(self) -> npt.NDArray[Any]:
        """The values; on a CPU they change with the tensor."""
        return self._tensor.numpy(force=True) if self._view is None else self._view

    def write(self, values: npt.NDArray[Any]) -> None:
        """Set all entries."""
        if self._view is None:
            self._tensor.copy_(torch.from_numpy(values))
        else:
            self._view[:] = values
