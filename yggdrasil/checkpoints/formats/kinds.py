"""Quantisation formats that the kernels read: GGUF's type numbers and block sizes."""

from enum import IntEnum


class Format(IntEnum):
    """Formats of quantised weights; the values are GGUF's type numbers."""

    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    MXFP4 = 39


FORMATS = tuple(Format)  # all are supported by the kernels of `quantised_format.h`
BLOCKS: dict[int, tuple[int, int]] = {  # format -> weights per block, bytes per block
    Format.Q4_0: (32, 18),
    Format.Q4_1: (32, 20),
    Format.Q5_0: (32, 22),
    Format.Q5_1: (32, 24),
    Format.Q8_0: (32, 34),
    Format.Q4_K: (256, 144),
    Format.Q5_K: (256, 176),
    Format.Q6_K: (256, 210),
    Format.MXFP4: (32, 17),
}
