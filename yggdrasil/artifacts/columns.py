"""Compress columns of non-negative integers: byte planes, deflated.

A packed column consists of the number of values (8 bytes), the bytes per value (1 byte), both little endian, and the
deflated byte planes, beginning with the lowest byte of all values.
"""

import struct
import zlib
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", np.int32, np.int64)

_HEADER = struct.Struct("<QB")
_MOST_DEFLATED = 1100  # zlib's highest compression ratio; a larger size in the header is invalid


def pack_column(values: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Compress ``values`` [n], all at least 0, to uint8 bytes: byte planes, deflated by zlib, with a header.

    Raises:
        ValueError: a value is negative.
    """
    if values.size and int(values.min()) < 0:
        raise ValueError("a packed column holds no number below zero")
    width = max((int(values.max(initial=0)).bit_length() + 7) // 8, 1)
    planes = values.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].T
    data = _HEADER.pack(len(values), width) + zlib.compress(np.ascontiguousarray(planes).tobytes(), 6)
    return np.frombuffer(data, dtype=np.uint8)


def column_length(packed: npt.NDArray[np.uint8]) -> int:
    """Return the number of values that a packed column's header states; ``unpack_column`` checks the number.

    Raises:
        ValueError: the bytes are not a packed column.
    """
    if len(packed) < _HEADER.size or (count := _HEADER.unpack_from(packed.data)[0]) > _MOST_DEFLATED * len(packed):
        raise ValueError("a packed column has an impossible header")
    return int(count)


def unpack_column(packed: npt.NDArray[np.uint8], dtype: type[Number]) -> npt.NDArray[Number]:
    """Return the values, [n] in ``dtype``, of a column that ``pack_column`` has compressed to uint8 bytes.

    Args:
        dtype: dtype of the result, int32 or int64; int32 takes half of the memory.

    Raises:
        ValueError: the bytes are not a packed column, or a value does not fit ``dtype``.
    """
    data = packed.data
    try:
        count, width = _HEADER.unpack_from(data)
        size, most = count * width, np.dtype(dtype).itemsize
        if not 1 <= width <= 8 or size > _MOST_DEFLATED * len(data):
            raise ValueError("a packed column has an impossible header")
        if width > most:
            raise ValueError("a packed column holds numbers that are too large")
        inflater = zlib.decompressobj()
        planes = inflater.decompress(data[_HEADER.size :], size + 1)
        if len(planes) != size or not inflater.eof:
            raise ValueError("a packed column is shorter or longer than its header says")
    except (struct.error, zlib.error) as error:
        raise ValueError(f"a packed column is damaged: {error}") from error
    values = np.zeros((count, most), dtype=np.uint8)
    for place, plane in enumerate(np.frombuffer(planes, dtype=np.uint8).reshape(width, count)):
        values[:, place] = plane  # plane by plane: NumPy copies the transpose of all planes at a third of the speed
    numbers: npt.NDArray[Number] = values.view(f"<i{most}").reshape(count).astype(dtype, copy=False)
    if width == most and count and numbers.min() < 0:
        raise ValueError("a packed column holds numbers that are too large")
    return numbers
