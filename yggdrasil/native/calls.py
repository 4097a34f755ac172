"""Call the native library's C functions as operators, according to their schemas (``common/c_api.h``).

The C function of operator ``name`` is ``yggdrasil_name``. It takes the schema's arguments in order: a tensor as a view,
or null for None; a list as a pointer and a count. Then follow views of the results, which the operator's shape function
allocates, or a pointer to an integer result.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from yggdrasil.native.build import Native
from yggdrasil.native.views import dtype_number, view_of, views_of

_Values = list[Any]
Views = ctypes.c_char_p  # packed views or numbers as bytes, which the library only reads


def call_of(name: str, schema: Any, shape: Callable[..., Any] | None, *, threads: bool = False) -> Callable[..., Any]:
    """Return operator ``name`` as a Python function.

    ``shape`` allocates its results; ``threads`` passes PyTorch's number of threads as last argument.
    """
    assert Native.library is not None
    function = getattr(Native.library, f"yggdrasil_{name}")
    returned = [str(each.type) for each in schema.returns]
    kinds = [_KINDS[str(argument.real_type)] for argument in schema.arguments]
    types = [each for kind in kinds for each in kind[1]] + [ctypes.c_int64] * threads
    types += _RESULT_TYPES[returned[0]] * len(returned) if returned else []
    function.argtypes, function.restype = types, ctypes.c_int32
    converters = [kind[0] for kind in kinds]

    def call(*arguments: Any) -> Any:
        values: _Values = []
        for convert, argument in zip(converters, arguments, strict=True):
            convert(argument, values)
        if threads:
            values.append(torch.get_num_threads())
        results = shape(*arguments) if shape is not None else None
        _append_results(results, values)
        if function(*values) < 0:
            raise RuntimeError(error_sentence())
        return results

    def count(*arguments: Any) -> int:
        number = ctypes.c_int64()
        values: _Values = []
        for convert, argument in zip(converters, arguments, strict=True):
            convert(argument, values)
        if function(*values, ctypes.byref(number)) < 0:
            raise RuntimeError(error_sentence())
        return number.value

    return count if returned == ["int"] else call


def check(code: int) -> None:
    """Raise RuntimeError with the library's message if ``code``, returned by a call, is negative."""
    if code < 0:
        raise RuntimeError(error_sentence())


def error_sentence() -> str:
    """Return the library's message for this thread's last failed call."""
    assert Native.library is not None
    function = Native.library.yggdrasil_error
    function.restype = ctypes.c_char_p
    found: bytes = function()
    return found.decode(errors="replace")


def numbers_of(numbers: Sequence[int]) -> bytes:
    """Pack integers as consecutive int64."""
    return _packer(len(numbers), "q")(*numbers)


@cache
def _packer(count: int, kind: str) -> Callable[..., bytes]:
    return struct.Struct(f"={count}{kind}").pack


def _append_results(results: Any, values: _Values) -> None:
    if isinstance(results, list):
        values += (views_of(results), len(results))
    elif isinstance(results, tuple):
        values += map(view_of, results)
    elif results is not None:
        values.append(view_of(results))


def _append_tensor(tensor: Tensor | None, values: _Values) -> None:
    values.append(None if tensor is None else view_of(tensor))


def _append_tensors(tensors: Sequence[Tensor | None], values: _Values) -> None:
    values += (views_of(tensors), len(tensors))


def _append_integers(numbers: Sequence[int], values: _Values) -> None:
    values += (_packer(len(numbers), "q")(*numbers), len(numbers))


def _append_floats(numbers: Sequence[float], values: _Values) -> None:
    values += (_packer(len(numbers), "d")(*numbers), len(numbers))


def _append_dtype(dtype: torch.dtype, values: _Values) -> None:
    values.append(dtype_number(dtype))


def _append_value(value: float, values: _Values) -> None:
    values.append(value)


_LIST = (Views, ctypes.c_int64)
# Schema type -> (function that appends an argument to the C arguments, their C types).
_KINDS: dict[str, tuple[Callable[[Any, _Values], None], tuple[Any, ...]]] = {
    "Tensor": (_append_tensor, (Views,)),
    "Optional[Tensor]": (_append_tensor, (Views,)),
    "List[Tensor]": (_append_tensors, _LIST),
    "List[Optional[Tensor]]": (_append_tensors, _LIST),
    "List[int]": (_append_integers, _LIST),
    "List[float]": (_append_floats, _LIST),
    "int": (_append_value, (ctypes.c_int64,)),
    "SymInt": (_append_value, (ctypes.c_int64,)),
    "float": (_append_value, (ctypes.c_double,)),
    "bool": (_append_value, (ctypes.c_bool,)),
    "ScalarType": (_append_dtype, (ctypes.c_int32,)),
}
_RESULT_TYPES: dict[str, list[Any]] = {
    "Tensor": [Views],
    "List[Tensor]": [*_LIST],
    "int": [ctypes.POINTER(ctypes.c_int64)],
}
