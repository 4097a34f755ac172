"""PyTorch on one thread, while operators of ours run on threads of their own or work is too small to share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's idle threads spin on the cores that our operators use: a pass then takes twice as long and more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
