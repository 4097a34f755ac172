"""Memory for tensors: on huge pages if the system supports them, made resident before its use. Imports no torch.

The system clears every page when it is first written, and a virtual machine may first have to get the page from its
host: up to 2 s per gigabyte. ``reserve`` makes pages resident in a thread while the program imports PyTorch and opens
the tokenizer.
"""

import ctypes
import mmap
import sys
from contextlib import suppress
from threading import Thread

_COLLAPSE = 25  # MADV_COLLAPSE (Linux 6.1): resident pages become huge pages at once
_POPULATE = 23  # MADV_POPULATE_WRITE (Linux 5.14): pages become resident as if they were written
_STEP = 2 << 20  # bytes that one call makes resident; the importing thread cannot map memory meanwhile
_ROOM = 64 << 20  # address space beyond the expected size, for alignment and padding; it takes no memory until used


def new_region(num_bytes: int) -> mmap.mmap:
    """Map ``num_bytes`` of zeros, private to this process. A page takes memory when it is first written."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def use_huge_pages(region: mmap.mmap, *, collapses: bool = False) -> None:
    """Advise the system to back ``region`` with huge pages; some systems keep small pages.

    Args:
        collapses: also move resident small pages to huge pages.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        for advice in (mmap.MADV_HUGEPAGE, *([_COLLAPSE] if collapses else [])):
            with suppress(OSError):
                region.madvise(advice)


class Reserved:
    """A memory region whose first ``num_bytes`` a thread makes resident, unless ``stop`` ends the thread before."""

    def __init__(self, num_bytes: int) -> None:
        self.region = new_region(num_bytes + _ROOM)
        use_huge_pages(self.region)
        self._num_bytes, self._is_stopped = num_bytes, False
        self._thread = Thread(target=self._populate, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make no more pages of the region resident, and wait until the thread has ended."""
        self._is_stopped = True
        self._thread.join()

    def _populate(self) -> None:
        start = ctypes.c_char.from_buffer(self.region)  # keeps the region mapped
        madvise = ctypes.CDLL(None).madvise  # releases the GIL, unlike mmap's own method
        for offset in range(0, self._num_bytes, _STEP):
            size = min(_STEP, self._num_bytes - offset)
            address = ctypes.c_void_p(ctypes.addressof(start) + offset)
            if self._is_stopped or madvise(address, ctypes.c_size_t(size), _POPULATE) != 0:
                return


_reserved: list[Reserved] = []  # at most one


def reserve(num_bytes: int) -> None:
    """Begin to make ``num_bytes`` of host memory resident in a thread, for the weights of the next model.

    The call does nothing on other systems than Linux, or while an earlier reservation is neither taken nor dropped.
    The weights' loader gets the memory by ``take_reserved``; if no model is loaded, ``drop_reserved`` frees the memory.
    """
    size = num_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and size > 0 and not _reserved:
        with suppress(OSError, RuntimeError):  # no address space, or no thread: memory becomes resident when it is used
            _reserved.append(Reserved(size))


def take_reserved() -> Reserved | None:
    """Return the host memory that ``reserve`` is making resident, which the caller then owns, or None."""
    return _reserved.pop() if _reserved else None


def drop_reserved() -> None:
    """Free the host memory that ``reserve`` has made resident, if no model's loader has taken it."""
    if (found := take_reserved()) is not None:
        found.stop()


def trim_heap() -> None:
    """Give the free memory of this process's heap back to the system (glibc only).

    Otherwise the heap may keep that memory in pieces that are too small for later allocations.
    """
    with suppress(OSError, AttributeError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
