"""Checks whether a weight can be packed, and frees the memory of memory-mapped weights."""

import ctypes
import mmap
import sys

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float32)
_DONT_NEED = 4  # MADV_DONTNEED: unmap the pages; an access reads them from the file again
_PAGE_OUT = 21  # MADV_PAGEOUT: ask the system to reclaim the pages; an access reads them again


def is_packable(weight: Tensor) -> bool:
    """Return whether the kernels can pack weights of the dtype and device of ``weight`` [..., N, K].

    The shape is not checked; K must be even. Weights on the meta device count as packable, to find out which will be
    packed before they are loaded.
    """
    return weight.dtype in _DTYPES and weight.device.type in ("cpu", "meta")


def release(tensor: Tensor, unit: int = mmap.PAGESIZE) -> None:
    """Give the memory of a contiguous tensor back to the system, in whole pages of ``unit`` bytes; on Linux only.

    The tensor stays valid: an access reads the mapped file again. A tensor that maps no file loses its values, and an
    access reads zeros.
    """
    _advise(tensor, _DONT_NEED, unit)


def page_out(weight: Tensor) -> None:
    """Let the operating system reclaim the memory of a contiguous weight; an access reads its values again.

    Otherwise a model would be resident twice after packing. Dropping the tensor is not enough: the mapping of its
    checkpoint file lives as long as any tensor of that file.
    """
    _advise(weight, _PAGE_OUT)


def _advise(weight: Tensor, advice: int, unit: int = mmap.PAGESIZE) -> None:
    if sys.platform != "linux" or not weight.is_contiguous():  # an expanded placeholder has no memory of its own
        return
    begin = -(-weight.data_ptr() // unit) * unit
    size = (weight.data_ptr() + weight.nbytes - begin) // unit * unit
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
