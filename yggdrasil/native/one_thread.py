"""Limits PyTorch to one thread, for code that runs native operators, which have separate threads, or small work."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: limit PyTorch to one thread in the block.

    PyTorch's idle threads spin on the cores that native operators use, which makes a pass more than 2x slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
