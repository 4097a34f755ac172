"""Schemas of the operators, and calls of the native library's C functions according to them (``common/c_api.h``).

Tensors are passed as views, the C struct ``YggdrasilTensor`` (``common/tensor.h``).

The C function of operator ``name`` is ``yggdrasil_name``. It takes the schema's arguments in order: a tensor as a view,
or null for None; a list as a pointer and a count. Then follow views of the results, which the operator's shape function
allocates, or a pointer to an integer result.
"""

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from yggdrasil.library.build import Native, error_sentence

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
_Values = list[Any]
Views = ctypes.c_char_p  # packed views or numbers as bytes; the library does not write to them


def view_of(tensor: Tensor | None) -> bytes:
    """Return the C struct ``YggdrasilTensor`` (address, dtype, sizes, strides) of a CPU tensor, or of None, as bytes.

    The struct does not keep the tensor alive.

    Raises:
        RuntimeError: the tensor's dtype or number of dimensions is unsupported, or the tensor is not on the CPU.
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
    """Return the C structs ``YggdrasilTensor`` of several CPU tensors (or None), one after another, as bytes.

    The structs do not keep the tensors alive.
    """
    return b"".join(map(view_of, tensors))


def call_of(name: str, schema: Any, shape: Callable[..., Any] | None, *, threads: bool = False) -> Callable[..., Any]:
    """Return a Python function that calls the C function of the operator ``name``, and raises RuntimeError if it fails.

    The Python function takes the schema's arguments by position. It returns the results that ``shape`` allocates, or an
    integer if the schema returns one.

    Args:
        schema: the operator's parsed schema, by which arguments are converted.
        shape: function of the same arguments that allocates the results; None for operators without result tensors.
        threads: whether PyTorch's number of threads is passed as a last argument.
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


def numbers_of(numbers: Sequence[int]) -> bytes:
    """Return ``numbers`` as bytes: consecutive int64 values."""
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
    values.append(_DTYPES[dtype])


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

# Operations fused with linear layers: gate and norm of the input, residual of the output.
_AROUND = "Tensor? gate, bool gelu, Tensor? norm, bool plus_one, float eps, Tensor? residual"

_ALL = (
    "packed_shape(Tensor weight) -> int[]",
    "pack_linear(Tensor weight, Tensor(a!) packed) -> ()",
    "packed_linear(Tensor input, Tensor packed, Tensor? bias, int out_features, int num_threads) -> Tensor",
    "plain_linear(Tensor input, Tensor weight, Tensor? bias, int num_threads) -> Tensor",
    "packed_experts(Tensor input, Tensor chosen, Tensor shares, Tensor gate_up, Tensor down, Tensor[] biases, "
    "int inner_features, int activation, float[] clamp, int num_threads) -> Tensor",
    f"packed_linears(Tensor input, {_AROUND}, Tensor[] packed, Tensor?[] biases, int[] out_features, int num_threads) "
    "-> Tensor[]",
    "norm_rows(Tensor input, Tensor norm, bool plus_one, float eps, Tensor? residual, int num_threads) -> Tensor",
    "packed_best(Tensor input, Tensor packed, Tensor? bias, int out_features, int num_threads) -> (Tensor, Tensor)",
    "quantised_best(Tensor input, Tensor packed, Tensor? bias, int out_features, int format, int num_threads) "
    "-> (Tensor, Tensor)",
    "has_byte_products() -> bool",
    "bounded_argmax(Tensor input, Tensor packed, Tensor? bias, Tensor copy, Tensor factors, int out_features, "
    "int num_threads) -> (Tensor, Tensor)",
    "quantised_shape(Tensor rows, int format, int inputs) -> int[]",
    "pack_quantised(Tensor rows, int format, int inputs, Tensor(a!) packed) -> ()",
    "quantised_linear(Tensor input, Tensor packed, Tensor? bias, int out_features, int format, int num_threads) "
    "-> Tensor",
    f"quantised_linears(Tensor input, {_AROUND}, Tensor[] packed, Tensor?[] biases, int[] out_features, int[] formats, "
    "int num_threads) -> Tensor[]",
    "quantised_experts(Tensor input, Tensor chosen, Tensor shares, Tensor[] packed, int[] formats, "
    "Tensor[] biases, int inner_features, int activation, float[] clamp, int num_threads) -> Tensor",
    "quantised_rows(Tensor ids, Tensor packed, int format, int inputs, int num_rows, ScalarType dtype) -> Tensor",
    "tree_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor offsets, Tensor tree_mask, float scale, int window, float softcap, Tensor? sinks, "
    "int num_threads) -> Tensor",
    "rows_attention(Tensor query, Tensor keys, Tensor values, Tensor lengths, float scale, int window, float softcap, "
    "int num_threads) -> Tensor",
    "tree_convolution(Tensor input, Tensor weight, Tensor? bias, Tensor window, Tensor(a!) inputs, Tensor offsets, "
    "Tensor parents, bool silu, int num_threads) -> Tensor",
    "tree_recurrence(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor strength, bool delta, Tensor state, "
    "Tensor(a!) decays, Tensor(b!) strengths, Tensor offsets, Tensor parents, int num_threads) -> Tensor",
    "commit_states(Tensor(a!)[] windows, Tensor[] inputs, Tensor(b!)[] states, Tensor[] decays, Tensor[] strengths, "
    "Tensor[] taps, Tensor[] biases, bool delta, int[] slots, int num_threads) -> ()",
    "best_tokens(Tensor logits, int num_threads) -> (Tensor, Tensor)",
    "top_candidates(Tensor values, SymInt k) -> (Tensor, Tensor)",
    "likely_draws(Tensor scores, int key, int position, Tensor(a!) tokens) -> int",
    "drawn_token(Tensor logits, float temperature, int top_k, float top_p, float min_p, int key, int position, "
    "Tensor(a!) margin) -> int",
    "reweigh(Tensor likely, Tensor edges, Tensor tokens, Tensor levels, Tensor draws, Tensor weights) -> Tensor",
    "keep_stack(Tensor[] tensors, int[] kinds, int[] places, int[] code, int[] code_sizes, float[] numbers, "
    "int[] sizes) -> int",  # ``layer_stack.h``
    "run_stack(int number, Tensor carried, Tensor[] shared, int[] kept, int num_threads) -> Tensor[]",
    "move_rows(Tensor(a!)[] caches, int[] sources, int destination) -> ()",
    "keep_rows(Tensor(a!)[] caches, Tensor start, Tensor rows, Tensor count) -> ()",
    "rank_nodes(Tensor scores, Tensor(a!) order, Tensor(b!) expected) -> ()",
    "read_words(Tensor buffer, int num_threads) -> int",
)
SCHEMAS = {schema.split("(", 1)[0]: schema for schema in _ALL}


def _rows(x: Tensor, out_features: int) -> Tensor:
    """Allocate the result of a linear layer over ``x`` [..., K], [..., out_features]."""
    return x.new_empty((*x.shape[:-1], out_features))


def _each(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [_rows(x, size) for size in sizes]


def _chosen(x: Tensor, *count: int) -> tuple[Tensor, Tensor]:
    """Allocate values and int64 indices chosen in each row of ``x`` [..., K], [R, *count] each."""
    shape = (prod(x.shape[:-1]), *count)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


# Functions that allocate an operator's results: for tracing without running, and as outputs of C calls.
SHAPES: dict[str, Callable[..., Any]] = {
    "packed_linear": lambda x, packed, bias, out_features, *_: _rows(x, out_features),
    "quantised_linear": lambda x, packed, bias, out_features, *_: _rows(x, out_features),
    "plain_linear": lambda x, weight, *_: _rows(x, weight.shape[0]),
    "packed_linears": lambda x, *others: _each(x, others[-2]),
    "quantised_linears": lambda x, *others: _each(x, others[-3]),
    "quantised_rows": lambda ids, packed, form, inputs, rows, dtype: ids.new_empty((*ids.shape, inputs), dtype=dtype),
    "packed_experts": lambda x, *_: x.new_empty(x.shape),
    "quantised_experts": lambda x, *_: x.new_empty(x.shape),
    "norm_rows": lambda x, *_: x.new_empty(x.shape),
    "packed_best": lambda x, *_: _chosen(x),
    "quantised_best": lambda x, *_: _chosen(x),
    "bounded_argmax": lambda x, *_: _chosen(x),
    "best_tokens": lambda logits, _: _chosen(logits),
    "top_candidates": lambda values, k: _chosen(values, k),
    "reweigh": lambda likely, *_: likely.new_empty(likely.shape),
    "tree_attention": lambda query, *_: query.new_empty((1, query.shape[2], query.shape[1], query.shape[3])),
    "rows_attention": lambda query, *_: query.new_empty(query.shape),
    "tree_convolution": lambda x, *_: x.new_empty(x.shape),
    "tree_recurrence": lambda query, key, value, *_: value.new_empty(value.shape),
    "commit_states": lambda *_: None,
    "run_stack": lambda number, carried, shared, kept, _: [carried.new_empty(carried.shape) for _ in kept],
    "move_rows": lambda *_: None,
}
