"""GGUF's numbers for the formats that our kernels read, and the sizes of their blocks."""

from enum import IntEnum


class Format(IntEnum):
    """Formats of quantised weights, numbered as in GGUF files."""

    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    MXFP4 = 39


FORMATS = tuple(Format)  # what the kernels of `quantised_format.h` read
BLOCKS: dict[int, tuple[int, int]] = {  # format -> weights a block, bytes a block
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
