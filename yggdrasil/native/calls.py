"""Operators as calls of the native library's C functions, by their schemas (``common/c_api.h``).

Of an operator ``name`` the C function is ``yggdrasil_name``. It takes the schema's arguments in order: a tensor as a
view, null where there is none; a list as a pointer and a count. Behind them come views of its results, which the
operator's shape function makes here, or a pointer to a number.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from yggdrasil.native.build import Native
from yggdrasil.native.views import dtype_number, view_of, views_of

_Values = list[Any]


def call_of(name: str, schema: Any, shape: Callable[..., Any] | None, *, threads: bool = False) -> Callable[..., Any]:
    """The operator ``name`` as a Python function; ``shape`` makes its results, ``threads`` appends PyTorch's number."""
    assert Native.library is not None
    function = getattr(Native.library, f"yggdrasil_{name}")
    function.restype = ctypes.c_int32
    converters = [_CONVERTERS[_kind(argument)] for argument in schema.arguments]
    gives_number = [str(each.type) for each in schema.returns] == ["int"]

    def call(*arguments: Any) -> Any:
        values: _Values = []
        for convert, argument in zip(converters, arguments, strict=True):
            convert(argument, values)
        if threads:
            values.append(ctypes.c_int64(torch.get_num_threads()))
        if gives_number:
            number = ctypes.c_int64()
            check(function(*values, ctypes.byref(number)))
            return number.value
        results = shape(*arguments) if shape is not None else None
        _append_results(results, values)
        check(function(*values))
        return results

    return call


def check(code: int) -> None:
    """RuntimeError with the library's own sentence where a call has failed."""
    if code < 0:
        raise RuntimeError(error_sentence())


def error_sentence() -> str:
    """Why this thread's last call failed."""
    assert Native.library is not None
    function = Native.library.yggdrasil_error
    function.restype = ctypes.c_char_p
    found: bytes = function()
    return found.decode(errors="replace")


def numbers_of(numbers: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    """Integers one behind the other."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _append_results(results: Any, values: _Values) -> None:
    if isinstance(results, list):
        _append_tensors(results, values)
    elif isinstance(results, tuple):
        for result in results:
            _append_tensor(result, values)
    elif results is not None:
        _append_tensor(results, values)


def _append_tensor(tensor: Tensor | None, values: _Values) -> None:
    values.append(None if tensor is None else ctypes.byref(view_of(tensor)))


def _append_tensors(tensors: Sequence[Tensor | None], values: _Values) -> None:
    values += (views_of(tensors), ctypes.c_int64(len(tensors)))


def _append_integers(numbers: Sequence[int], values: _Values) -> None:
    values += (numbers_of(numbers), ctypes.c_int64(len(numbers)))


def _append_floats(numbers: Sequence[float], values: _Values) -> None:
    values += ((ctypes.c_double * len(numbers))(*numbers), ctypes.c_int64(len(numbers)))


def _kind(argument: Any) -> str:
    return str(argument.real_type)


_CONVERTERS: dict[str, Callable[[Any, _Values], None]] = {
    "Tensor": _append_tensor,
    "Optional[Tensor]": _append_tensor,
    "List[Tensor]": _append_tensors,
    "List[Optional[Tensor]]": _append_tensors,
    "List[int]": _append_integers,
    "List[float]": _append_floats,
    "int": lambda number, values: values.append(ctypes.c_int64(number)),
    "float": lambda number, values: values.append(ctypes.c_double(number)),
    "bool": lambda flag, values: values.append(ctypes.c_bool(flag)),
    "ScalarType": lambda dtype, values: values.append(ctypes.c_int32(dtype_number(dtype))),
}
