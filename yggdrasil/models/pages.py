"""Memory of weights that were read from a mapped file, and were copied since.

The mapping lives as long as any tensor of the checkpoint does, so dropping a tensor gives nothing back, and a model
would be resident twice.
"""

import ctypes
import mmap
import sys
from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")


class FilePages:
    """The private file mappings of this process, as they are when this is made; none where the system does not say."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        if sys.platform != "linux" or not _MAPS.exists():
            return
        for line in _MAPS.read_text().splitlines():
            addresses, permissions, _, _, inode, *_ = line.split()
            if inode != "0" and permissions.endswith("p"):
                begin, end = addresses.split("-")
                self._ranges.append((int(begin, 16), int(end, 16)))

    def give_back(self, weight: Tensor) -> None:
        """Drop the whole pages of ``weight`` where they came from a file: whoever reads it again, reads that file.

        Memory that is no file's is left alone.
        """
        begin = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and any(first <= begin and end <= last for first, last in self._ranges):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
