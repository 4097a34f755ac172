"""Packs rows of GGUF blocks by the native library alone, so that packing can start before PyTorch is imported."""

import ctypes
import struct
from typing import NamedTuple

from yggdrasil.library.build import Native, check

PANELS = 32  # rows of a pair of panels, the unit of the packed layout
_VIEW = struct.Struct("=Qii2q32x2q32x")  # common/tensor.h: address, dtype, dimensions, sizes, strides
_BYTE = 0  # number of the dtype uint8


class Matrix(NamedTuple):
    """A contiguous matrix of bytes in memory."""

    address: int
    rows: int
    columns: int

    def view(self) -> bytes:
        """Return the matrix as the C struct ``YggdrasilTensor`` (address, dtype, sizes, strides), as bytes."""
        return _VIEW.pack(self.address, _BYTE, 2, self.rows, self.columns, self.columns, 1)


def pair_bytes(form: int, inputs: int) -> int:
    """Return the size in bytes of a packed pair of panels (32 rows) of GGUF blocks.

    ``form`` is the GGUF type number of the blocks, and ``inputs`` the number of weights of a row. The native library
    must be loaded.

    Raises:
        RuntimeError: the library does not support the format, or the format with this number of weights.
    """
    assert Native.library is not None
    function = Native.library.yggdrasil_pair_bytes
    function.restype = ctypes.c_int64
    size: int = function(ctypes.c_int64(form), ctypes.c_int64(inputs))
    check(size)
    return size


def pack_blocks(rows: Matrix, form: int, inputs: int, packed: Matrix, num_threads: int) -> None:
    """Pack the rows of GGUF blocks in ``rows`` into the layout of the CPU's kernels, in ``packed``.

    ``packed`` must be zeros, with one row of ``pair_bytes`` bytes for each pair of panels (32 rows of blocks). ``form``
    is the GGUF type number of the blocks, and ``inputs`` the number of weights of a row.

    Raises:
        RuntimeError: the sizes do not fit the format.
    """
    assert Native.library is not None
    numbers = ctypes.c_int64(form), ctypes.c_int64(inputs)
    check(Native.library.yggdrasil_pack_quantised(rows.view(), *numbers, packed.view(), ctypes.c_int64(num_threads)))
