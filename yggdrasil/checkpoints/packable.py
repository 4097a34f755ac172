"""Which weights can be packed, and the memory of those that were."""

import ctypes
import mmap
import sys

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float32)
_DONT_NEED = 4  # MADV_DONTNEED: the pages are unmapped, and read from the file again if needed
_PAGE_OUT = 21  # MADV_PAGEOUT: the system may take the pages back; they are read from the file again if needed


def is_packable(weight: Tensor) -> bool:
    """Whether kernels know matrices [..., N, K] like these, where K is even.

    Those of a model on meta tell what will be packed of it.
    """
    return weight.dtype in _DTYPES and weight.device.type in ("cpu", "meta")


def release(weight: Tensor) -> None:
    """Unmap the pages of a weight that lies in a mapped file; what is read again comes from the file."""
    _advise(weight, _DONT_NEED)


def page_out(weight: Tensor) -> None:
    """Give up the memory of a weight that was read from a mapped file: else a model is resident twice once packed.

    The mapping lives as long as any tensor of the checkpoint does, so dropping the tensor is not enough.
    """
    _advise(weight, _PAGE_OUT)


def _advise(weight: Tensor, advice: int) -> None:
    if sys.platform != "linux" or not weight.is_contiguous():  # one number may stand for all: no memory of its own
        return
    begin = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (weight.data_ptr() + weight.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
