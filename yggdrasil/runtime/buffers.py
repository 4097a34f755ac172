"""Transfers between host and device: small inputs that the host writes, and small results that it reads."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


class HostBuffer:
    """An int64 tensor [size] on ``device`` (``tensor``), which the host writes between steps.

    On a CPU the write goes straight to its memory; elsewhere it is staged in pinned memory and copied asynchronously.
    Copies wait for the device's earlier work, so there are several stages: the host writes ahead without waiting.
    """

    _STAGES = 4

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor: Tensor = torch.zeros(size, dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._is_staged = device.type != "cpu"
        self._view = self.tensor.numpy() if not self._is_staged else None
        stages = range(self._STAGES if self._is_staged else 0)
        self._stages = [torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda) for _ in stages]
        self._copied = [torch.cuda.Event() for _ in stages] if is_cuda else []
        self._stage = 0

    def write(self, *values: int) -> None:
        """Set the first ``len(values)`` entries of the device tensor to ``values``. Other entries keep their values."""
        if self._view is not None:
            if len(values) == 1:  # faster than assigning a slice, which builds an array
                self._view[0] = values[0]
            else:
                self._view[: len(values)] = values
            return
        before, self._stage = self._stage, (self._stage + 1) % self._STAGES
        staging = self._stages[self._stage]
        if self._copied:
            self._copied[self._stage].synchronize()  # the previous copy of this stage may not have begun
        staging.copy_(self._stages[before])  # entries that are not written keep their values
        staging[: len(values)] = torch.tensor(values)
        self.tensor.copy_(staging, non_blocking=True)
        if self._copied:
            self._copied[self._stage].record()


class HostView:
    """Host access to a tensor that is only ever written in place: a NumPy view on a CPU, copies on other devices."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._view: npt.NDArray[Any] | None = tensor.numpy() if tensor.device.type == "cpu" else None

    def read(self) -> npt.NDArray[Any]:
        """Return the tensor's current values as a NumPy array: on a CPU a view of the tensor, else a copy."""
        return self._tensor.numpy(force=True) if self._view is None else self._view

    def write(self, values: npt.NDArray[Any]) -> None:
        """Overwrite all entries of the tensor with ``values``, of the same shape."""
        if self._view is None:
            self._tensor.copy_(torch.from_numpy(values))
        else:
            self._view[:] = values


class HostCopies:
    """Copier of several tensors from ``device`` to the host through pinned memory, with a single synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._staged: dict[tuple[torch.Size, torch.dtype, int], Tensor] = {}

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of ``tensors`` on the host, after waiting for the device. Later calls do not overwrite them."""
        if not self._is_cuda:
            return [tensor.cpu().clone() for tensor in tensors]
        staged = [self._staging(tensor, number) for number, tensor in enumerate(tensors)]
        for host, tensor in zip(staged, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()
        return [host.clone() for host in staged]

    def _staging(self, tensor: Tensor, number: int) -> Tensor:
        key = tensor.shape, tensor.dtype, number
        if key not in self._staged:
            self._staged[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return self._staged[key]


class Readback:
    """Copier of int64 results to the host: one asynchronous copy into pinned memory, and one event to wait for."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None

    def begin(self, values: Tensor) -> None:
        """Start an asynchronous copy of ``values`` [n] int64 to the host. n is at most the buffer's size."""
        self._host[: values.numel()].copy_(values, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self, size: int) -> Tensor:
        """Wait for the last copy, and return its first ``size`` values, int64 on the host.

        The next copy overwrites them.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._host[:size]

    def read(self, values: Tensor) -> Tensor:
        """Copy ``values`` [n] int64 from the device, wait, and return them on the host.

        The next copy overwrites them.
        """
        self.begin(values)
        return self.wait(values.numel())
