"""Protocols of a model's pass and of steps that contain it, the pass's result, and transfers between host and device.

Dims: W rows of the pass, R rows whose logits are requested, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor, nn

HEAD_INPUT = -1  # index in ``ModelCall.hidden_layers`` that stands for the input of the LM head

Call = TypeVar("Call")


class Head(Protocol):
    """Protocol of a model's LM head."""

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states ``rows`` [R, H]."""

    def best(self, rows: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (largest logit [R], its token [R] int64) of each row of the hidden states ``rows`` [R, H].

        Of equal logits the first token is taken. NaN counts as the largest logit.

        Args:
            logits: the rows' logits [R, V] if they are already computed, else None.
        """


class Forward:
    """Result of one pass; unpacks as (logits, hidden, layers). Logits and argmax tokens are computed on access."""

    def __init__(self, hidden: Tensor, layers: list[Tensor], head: Head) -> None:
        self.hidden = hidden  # [R, H], the input of the LM head
        self.layers = layers  # outputs of the requested layers, each [W, H]
        self._head = head

    @cached_property
    def logits(self) -> Tensor:
        """Logits [R, V] of the requested rows, computed at the first access."""
        return self._head.logits(self.hidden)

    def best_tokens(self) -> tuple[Tensor, Tensor]:
        """Return (largest logit [R], its token [R] int64) of the requested rows, if possible without all logits."""
        return self._head.best(self.hidden, self.__dict__.get("logits"))

    def __iter__(self) -> "Iterator[Tensor | list[Tensor]]":
        return iter((self.logits, self.hidden, self.layers))


class ModelCall(Protocol):
    """Protocol of a callable that runs one pass of a model, with weights and caches as arguments."""

    vocab_size: int  # number of logits of a row
    hidden_layers: tuple[int, ...]  # indices of the layers whose outputs a pass returns

    def __call__(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,
        positions: Tensor,
        tree_mask: Tensor,
        offsets: Tensor,
        rows: Tensor | None = None,
    ) -> Forward:
        """Run the model on the W rows of a pass.

        Args:
            weights: the model's tensors, in the order of ``LoadedModel.tensors``.
            caches: the cache's tensors (``StaticCache.tensors``), which are written in place.
            tokens: [W] int64.
            positions: [W] int64.
            tree_mask: [W, T] bool; entry (w, t) says whether row w sees slot ``offsets[0]`` + t. Rows see all earlier
                slots.
            offsets: [2] int64: context length, first slot written.
            rows: [R] int64, rows whose logits are requested; None for all.
        """


class StepModule(nn.Module):
    """Base class of the computation of a step; subclasses define ``forward(weights, caches, *inputs)``."""

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the decoder layers that can be compiled separately; here none, so the step is compiled as a whole."""
        return ()

    def tracing(self) -> AbstractContextManager[object]:
        """Return the context manager under which the step and its layers must be traced; here it does nothing."""
        return nullcontext()


class CallStep(StepModule, Generic[Call]):
    """A step that contains a model call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the call's decoder layers, to be compiled separately; if empty, the step is compiled as a whole."""
        layers: Sequence[nn.Module] = getattr(self._call, "decoder_layers", ())  # traced calls have some
        return layers

    def tracing(self) -> AbstractContextManager[object]:
        """Return the call's context manager under which the step and its layers must be traced."""
        tracing: Callable[[], AbstractContextManager[object]] = getattr(self._call, "tracing", nullcontext)
        return tracing()


class PrefillStep(CallStep[ModelCall]):
    """Step that runs a chunk of committed tokens, padded to W rows, and returns the results of one row."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,
        start: Tensor,
        last: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run a chunk of a prompt through the model, and write its KV entries to ``caches``.

        Args:
            tokens: [W] int64, the chunk padded to W.
            start: [1] int64, number of tokens before the chunk.
            last: [1] int64, the row whose results are returned.

        Returns:
            (argmax token [1] int64, its logit [1], LM head input [1, H] float32, logits [1, V], [W, H] of each layer
                that a drafter reads)
        """
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        mask = rows[:, None] >= rows[None, :]
        offsets = start.expand(2).contiguous()
        found = self._call(weights, caches, tokens, start + rows, mask, offsets, last)
        logits = found.logits
        best, choice = found.best_tokens()
        return choice, best, found.hidden.float(), logits, *found.layers


def fitting(widths: Sequence[int], count: int) -> int:
    """Return the smallest of ``widths`` (ascending numbers of rows) that has room for ``count`` rows.

    Raises:
        AssertionError: ``count`` is larger than the last of ``widths``.
    """
    assert count <= widths[-1], f"{count} rows, and steps of {list(widths)}"
    return fitting_or_widest(widths, count)


def fitting_or_widest(widths: Sequence[int], count: int) -> int:
    """Return the smallest of ``widths`` (ascending numbers of rows) with room for ``count`` rows; else the largest."""
    return next((width for width in widths if width >= count), widths[-1])


class HostBuffer:
    """An int64 tensor [size] on ``device`` (``tensor``), which the host writes between steps.

    On a CPU ``write`` sets the tensor's memory directly; on a GPU it fills a staging buffer in pinned memory and starts
    an asynchronous copy. A copy waits for the device's earlier work, so there are 4 staging buffers: the host waits
    only if 4 copies are unfinished.
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
        """Set the first ``len(values)`` entries of ``tensor``; the others keep the values that ``write`` last set."""
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
        """Overwrite all entries of the tensor with ``values``, an array of the same shape."""
        if self._view is None:
            self._tensor.copy_(torch.from_numpy(values))
        else:
            self._view[:] = values


class HostCopies:
    """Copier of several tensors from ``device`` to the host through pinned memory, with a single synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda, self._is_cpu = device.type == "cuda", device.type == "cpu"
        self._staged: dict[tuple[torch.Size, torch.dtype, int], Tensor] = {}

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of ``tensors`` on the host, which later calls do not overwrite; waits for the device."""
        if self._is_cpu:
            return [tensor.clone() for tensor in tensors]
        staged = [self._staging(tensor, number) for number, tensor in enumerate(tensors)]
        for host, tensor in zip(staged, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        if self._is_cuda:
            copied = torch.cuda.Event()
            copied.record()
            copied.synchronize()
        return [host.clone() for host in staged]

    def _staging(self, tensor: Tensor, number: int) -> Tensor:
        key = tensor.shape, tensor.dtype, number
        if key not in self._staged:
            self._staged[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_cuda)
        return self._staged[key]


class Readback:
    """Copier of int64 results to the host: one asynchronous copy into pinned memory, and one event to wait for."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None

    def begin(self, values: Tensor) -> None:
        """Start an asynchronous copy of ``values`` [n] int64 to the host; n must be at most the constructor's size."""
        self._host[: values.numel()].copy_(values, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self, size: int) -> Tensor:
        """Wait for the last copy, and return its first ``size`` values, int64 on the host.

        The next copy overwrites the returned tensor.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._host[:size]

    def read(self, values: Tensor) -> Tensor:
        """Copy ``values`` [n] int64 from the device to the host, wait, and return the copy.

        The next copy overwrites the returned tensor.
        """
        self.begin(values)
        return self.wait(values.numel())
