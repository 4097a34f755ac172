"""Tensors as the native library's C interface takes them (``common/tensor.h``)."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

_MOST_DIMS = 6
_DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}  # as PyTorch numbers its ScalarTypes


class View(ctypes.Structure):
    """``YggdrasilTensor``: where a tensor lies, and how. It keeps nothing alive."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * _MOST_DIMS),
        ("strides", ctypes.c_int64 * _MOST_DIMS),
    )


def view_of(tensor: Tensor | None) -> View:
    """The view of a CPU tensor, or of none.

    Raises:
        RuntimeError: the tensor is of a dtype or of more dimensions than the library knows, or not on the CPU.
    """
    if tensor is None:
        return View(None, 0, -1)
    number, dim = _DTYPES.get(tensor.dtype), tensor.dim()
    if number is None or dim > _MOST_DIMS or tensor.device.type != "cpu":
        raise RuntimeError(
            f"no CPU kernel takes a tensor of dtype {tensor.dtype} with {dim} dimensions on {tensor.device}"
        )
    return View(tensor.data_ptr(), number, dim, tuple(tensor.shape), tensor.stride())


def views_of(tensors: Sequence[Tensor | None]) -> "ctypes.Array[View]":
    """Views of several tensors, one behind the other."""
    return (View * len(tensors))(*map(view_of, tensors))


def dtype_number(dtype: torch.dtype) -> int:
    """How PyTorch numbers the dtype."""
    return _DTYPES[dtype]
