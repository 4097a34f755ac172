"""Moving accepted rows of a cache, for whoever does it behind every pass."""

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
    """``cache.commit``, where it can be a plain C call, or a capture where there is a ``recorder``.

    A capture moves ``most`` rows at once.
    """
    if recorder is not None:
        return CapturedMover(cache, recorder, most)
    is_here = cache.keys[0].device.type == "cpu" and is_native()
    return _NativeMover(cache) if is_here else cache.commit


class CapturedMover:
    """One launch, whatever the number of rows."""

    def __init__(self, cache: StaticCache, recorder: Recorder, most: int) -> None:
        device = cache.keys[0].device
        self._start, self._rows, self._count = HostBuffer(1, device), HostBuffer(most, device), HostBuffer(1, device)
        self._cache = cache
        self.capture = recorder.capture(self.move)

    def __call__(self, sources: Sequence[int], destination: int) -> None:
        self.write(sources, destination)
        self.capture()

    def write(self, sources: Sequence[int], destination: int) -> None:
        """What the next ``move`` moves."""
        self._start.write(destination)
        self._rows.write(*(source - destination for source in sources))
        self._count.write(len(sources))

    def move(self) -> Sequence[Tensor]:
        """The work itself, for captures of which it is a part."""
        arguments = self._start.tensor, self._rows.tensor, self._count.tensor
        torch.ops.yggdrasil.keep_rows(self._cache.rows(), *arguments)
        return ()


class _NativeMover:
    """Its tensors, two a layer, are handed over once and not at each call."""

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
