"""Convert tensors to the C struct ``YggdrasilTensor`` of the native library (``common/tensor.h``)."""

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
}  # PyTorch's ScalarType numbers
# Pack address, dtype, number of dimensions, sizes, strides; one function per number of dimensions, padded with zeros.
_UNUSED = [8 * (_MOST_DIMS - dim) for dim in range(_MOST_DIMS + 1)]  # bytes
_PACK = [struct.Struct(f"=Qii{dim}q{unused}x{dim}q{unused}x").pack for dim, unused in enumerate(_UNUSED)]
_NONE = _PACK[0](0, 0, -1)


def view_of(tensor: Tensor | None) -> bytes:
    """Return the view of a CPU tensor, or of None, as bytes; the view does not keep the tensor alive.

    Raises:
        RuntimeError: if the tensor's dtype or number of dimensions is unsupported, or it is not on the CPU.
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
    """Return the concatenated views of several tensors."""
    return b"".join(map(view_of, tensors))


def dtype_number(dtype: torch.dtype) -> int:
    """Return PyTorch's ScalarType number of ``dtype``."""
    return _DTYPES[dtype]
