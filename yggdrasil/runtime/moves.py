"""Moving accepted rows of a cache, for whoever does it behind every pass."""

from collections.abc import Callable, Sequence

from yggdrasil.native import is_native
from yggdrasil.native.direct import Mailbox, direct, native_rows
from yggdrasil.runtime.cache import StaticCache

Move = Callable[[Sequence[int], int], None]


def row_mover(cache: StaticCache) -> Move:
    """``cache.commit``, where it can be a plain C call."""
    is_here = cache.keys[0].device.type == "cpu" and is_native()
    return _NativeMover(cache) if is_here else cache.commit


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
