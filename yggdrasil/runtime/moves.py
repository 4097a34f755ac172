"""Move the accepted rows of a cache after a pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from yggdrasil.native import is_native
from yggdrasil.native.direct import Mailbox, direct, native_rows
from yggdrasil.runtime.buffers import HostBuffer
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.graphs import Recorder

Move = Callable[[Sequence[int], int], None]


def row_mover(cache: StaticCache, recorder: Recorder | None = None, most: int = 1) -> Move:
    """Return a function equivalent to ``cache.commit``.

    With a ``recorder`` it is a capture that moves up to ``most`` rows; on a CPU with the native library, a direct C
    call.
    """
    if recorder is not None:
        return CapturedMover(cache, recorder, most)
    is_here = cache.keys[0].device.type == "cpu" and is_native()
    return _NativeMover(cache) if is_here else cache.commit


class CapturedMover:
    """Move rows by one launch of a capture, whatever their number."""

    def __init__(self, cache: StaticCache, recorder: Recorder, most: int) -> None:
        device = cache.keys[0].device
        self._start, self._rows, self._count = HostBuffer(1, device), HostBuffer(most, device), HostBuffer(1, device)
        self._cache = cache
        self.capture = recorder.capture(self.move)

    def __call__(self, sources: Sequence[int], destination: int) -> None:
        self.write(sources, destination)
        self.capture()

    def write(self, sources: Sequence[int], destination: int) -> None:
        """Set the cache rows that the next ``move`` moves: those in slots ``sources``, to ``destination`` onwards."""
        self._start.write(destination)
        self._rows.write(*(source - destination for source in sources))
        self._count.write(len(sources))

    def move(self) -> Sequence[Tensor]:
        """Move the rows set by ``write``; the operator call, for captures that include it."""
        arguments = self._start.tensor, self._rows.tensor, self._count.tensor
        torch.ops.yggdrasil.keep_rows(self._cache.rows(), *arguments)
        return ()


class _NativeMover:
    """Move rows with a direct C call; the cache's tensors are registered once, at construction."""

    def __init__(self, cache: StaticCache) -> None:
        self._mail = Mailbox(2 + cache.capacity)
        self._rows = native_rows(cache.rows(), self._mail.tensor)
        self._move = direct("move", self._rows)

    def __call__(self, sources: Sequence[int], destination: int) -> None:
        numbers = self._mail.numbers
        numbers[0], numbers[1] = len(sources), destination
        for place, source in enumerate(sources, 2):
            numbers[place] = source
        if self._move() < 0:
            raise RuntimeError("accepted rows could not be moved")
