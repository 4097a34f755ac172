"""Tensors as the native library's C interface takes them (``common/tensor.h``): bytes of a ``YggdrasilTensor``."""

import struct
from collections.abc import Iterable

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
# Address, dtype, number of dimensions, sizes, strides: one function a number of dimensions, filled up with zeros.
_UNUSED = [8 * (_MOST_DIMS - dim) for dim in range(_MOST_DIMS + 1)]  # bytes
_PACK = [struct.Struct(f"=Qii{dim}q{unused}x{dim}q{unused}x").pack for dim, unused in enumerate(_UNUSED)]
_NONE = _PACK[0](0, 0, -1)


def view_of(tensor: Tensor | None) -> bytes:
    """The view of a CPU tensor, or of none; it keeps nothing alive.

    Raises:
        RuntimeError: the tensor is of a dtype or of more dimensions than the library knows, or not on the CPU.
    """
    if tensor is None:
        return _NONE
    shape = tensor.shape
    dim = len(shape)
    number = _DTYPES.get(tensor.dtype)
    if number is None or dim > _MOST_DIMS or not tensor.is_cpu:
        described = f"dtype {tensor.dtype} with {dim} dimensions on {tensor.device}"
        raise RuntimeError(f"no CPU kernel takes a tensor of {described}")
    return _PACK[dim](tensor.data_ptr(), number, dim, *shape, *tensor.stride())


def views_of(tensors: Iterable[Tensor | None]) -> bytes:
    """Views of several tensors, one behind the other."""
    return b"".join(map(view_of, tensors))


def dtype_number(dtype: torch.dtype) -> int:
    """How PyTorch numbers the dtype."""
    return _DTYPES[dtype]
