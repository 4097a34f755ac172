"""Quantisation formats that the kernels read: GGUF's type numbers and block sizes."""

from enum import IntEnum

from yggdrasil.artifacts.gguf import BLOCK_SIZES


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
BLOCKS: dict[int, tuple[int, int]] = {form: BLOCK_SIZES[form] for form in Format}  # weights and bytes per block
