"""Allocates a step's tensors contiguously, on huge memory pages if the system supports them.

With 4 KiB pages, every 64th cache line needs an address translation, and hardware prefetching stops at page ends.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from yggdrasil.artifacts.memory import new_region, use_huge_pages

_REGION = 64 << 20  # bytes per region; pages become resident when they are written
HUGE_PAGE = 2 << 20  # bytes
_LINE = 64  # bytes; tensors are aligned to cache lines


class Arena:
    """Allocator of contiguous CPU tensors in large regions; a region is freed with the arena and the region's tensors.

    Each tensor has a separate storage, since compiled steps that write to one view of a storage would copy all views.
    With ``is_sparse``, pages are small until ``use_huge_pages`` is called: on huge pages a tensor with few rows in use
    takes 2 MiB for each of its heads. ``first`` is a region to fill before others are mapped.
    """

    def __init__(self, first: mmap.mmap | None = None, *, is_sparse: bool = False) -> None:
        self._regions = [] if first is None else [first]
        self._used = 0  # bytes of the last region
        self._is_sparse, self._has_huge_pages = is_sparse, not is_sparse

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a contiguous CPU tensor of zeros in the arena, aligned to 64 bytes."""
        count = torch.Size(shape).numel()
        num_bytes = count * dtype.itemsize
        if count == 0:
            return torch.zeros(*shape, dtype=dtype)
        if not self._regions or self._used + num_bytes > len(self._regions[-1]):
            self._regions.append(new_region(max(num_bytes, _REGION)))
            self._used = 0
            if self._has_huge_pages:
                use_huge_pages(self._regions[-1])
        begin, self._used = self._used, self._used + -(-num_bytes // _LINE) * _LINE
        return torch.frombuffer(self._regions[-1], dtype=dtype, count=count, offset=begin).view(*shape)

    @property
    def page(self) -> int:
        """Size in bytes of the memory pages that new tensors use."""
        return HUGE_PAGE if self._has_huge_pages else mmap.PAGESIZE

    def use_huge_pages(self) -> None:
        """Move the arena's resident memory to huge pages, and allocate later tensors on huge pages."""
        if not self._has_huge_pages:
            self._has_huge_pages = True
            for region in self._regions:
                use_huge_pages(region, collapses=True)

    def clear(self) -> None:
        """Give all memory of the arena back to the system; its tensors stay valid and read as zeros.

        A sparse arena returns to small pages. Nothing happens on systems without ``MADV_DONTNEED``.
        """
        for region in self._regions if hasattr(mmap, "MADV_DONTNEED") else ():
            region.madvise(mmap.MADV_DONTNEED)
            if self._is_sparse and self._has_huge_pages and hasattr(mmap, "MADV_NOHUGEPAGE"):
                with suppress(OSError):
                    region.madvise(mmap.MADV_NOHUGEPAGE)
        self._has_huge_pages = not self._is_sparse

    def free_rest(self) -> None:
        """Give the resident memory after the last tensor of the arena's last region back to the system."""
        begin = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._regions and begin < len(self._regions[-1]) and hasattr(mmap, "MADV_DONTNEED"):
            self._regions[-1].madvise(mmap.MADV_DONTNEED, begin)
