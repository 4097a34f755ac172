"""Plain C calls of native code, for what is done between two passes (``direct.h`` says why)."""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch


class Mailbox:
    """Numbers for native code: a buffer that both sides hold."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int64)
        self.numbers: memoryview = self.tensor.numpy().data  # quicker by the piece than an array


def direct(name: str, of: Any) -> Callable[[], int]:
    """The C function ``name`` of a native object, which the caller keeps; it returns -1 where it failed.

    Python's lock is kept: whoever got it in these few microseconds would hold it for milliseconds.
    """
    function = getattr(_library(), f"yggdrasil_{name}")
    function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_int64
    return partial(function, ctypes.c_void_p(of.address()))


@cache
def _library() -> ctypes.PyDLL:
    """All functions that the process knows: ``load_native`` has made those of the operators' library known."""
    return ctypes.PyDLL(None)
