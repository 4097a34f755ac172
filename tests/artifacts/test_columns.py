"""Packed columns are whole numbers in few bytes, and damaged ones are refused."""

import zlib

import numpy as np
import pytest

from yggdrasil.artifacts.columns import pack_column, unpack_column


@pytest.mark.parametrize(
    "values",
    [[], [0], [255, 256], [0, 1, 2**62], list(range(1000)), [2**32, 0, 7], [2**31 - 1], [5, 2**31]],
    ids=lambda each: str(len(each)),
)
def test_numbers_come_back(values):
    packed = pack_column(np.array(values, dtype=np.int64))
    back = unpack_column(packed, np.int64)

    assert back.dtype == np.int64
    assert back.tolist() == values
    if max(values, default=0) < 2**31:
        narrow = unpack_column(packed, np.int32)
        assert narrow.dtype == np.int32
        assert narrow.tolist() == values
        assert pack_column(narrow).tobytes() == packed.tobytes()
    else:
        with pytest.raises(ValueError, match="too large"):
            unpack_column(packed, np.int32)
    assert pack_column(np.arange(100_000) % 7).nbytes < 1000


def test_a_number_below_zero_is_refused():
    with pytest.raises(ValueError, match="below zero"):
        pack_column(np.array([1, -1]))


def header(count, width):
    return count.to_bytes(8, "little") + bytes([width])


@pytest.mark.parametrize(
    "data",
    [b"", header(3, 1), header(3, 9) + zlib.compress(b"abc"), header(2, 1) + zlib.compress(b"abc"),
     header(4, 1) + zlib.compress(b"abc"), header(3, 1) + b"abc", header(1 << 60, 8) + zlib.compress(b"abc"),
     header(3, 1) + zlib.compress(b"abc")[:-2]],
)  # fmt: skip
def test_damage_is_refused(data):
    with pytest.raises(ValueError, match="packed column"):
        unpack_column(np.frombuffer(data, dtype=np.uint8), np.int64)
