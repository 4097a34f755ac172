"""Memory that a step reads from end to end: tensors side by side, on huge pages where the system has them.

With pages of 4 KiB every 64th cache line costs an address translation, and the processor looks ahead no further.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_REGION = 64 << 20  # bytes; only what is written to becomes resident
_LINE = 64  # bytes: every tensor begins on a cache line


class Arena:
    """Hands out CPU tensors one behind the other; memory is given back when the last tensor of a region goes.

    Each has a storage of its own: steps that write to one of several views of a storage are compiled to copy it all.
    """

    def __init__(self) -> None:
        self._region: mmap.mmap | None = None
        self._used = 0  # bytes of the region

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of zeros."""
        count = torch.Size(shape).numel()
        num_bytes = count * dtype.itemsize
        if count == 0:
            return torch.zeros(*shape, dtype=dtype)
        if self._region is None or self._used + num_bytes > len(self._region):
            self._region, self._used = _region(max(num_bytes, _REGION)), 0
        begin, self._used = self._used, self._used + -(-num_bytes // _LINE) * _LINE
        return torch.frombuffer(self._region, dtype=dtype, count=count, offset=begin).view(*shape)


def _region(num_bytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return mmap.mmap(-1, num_bytes)
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system built without them goes on with small pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return region
