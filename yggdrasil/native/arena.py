"""Allocate a step's tensors contiguously, on huge pages if the system supports them.

With 4 KiB pages, every 64th cache line needs an address translation, and hardware prefetching stops at page ends.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_REGION = 64 << 20  # bytes per region; pages become resident when they are written
_LINE = 64  # bytes; tensors are aligned to cache lines


class Arena:
    """Allocator of contiguous CPU tensors; a region is freed with the last tensor in it.

    Each tensor has its own storage: compiled steps that write to one of several views of a storage would copy all.
    """

    def __init__(self) -> None:
        self._region: mmap.mmap | None = None
        self._used = 0  # bytes of the region

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a contiguous tensor of zeros."""
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
    with suppress(OSError):  # a kernel without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return region
