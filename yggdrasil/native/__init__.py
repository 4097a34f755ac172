"""The operators of a static-shape step, as ``torch.ops.yggdrasil``.

Each operator has a schema, a shape function and a portable implementation in PyTorch (any device). On CPUs a native
implementation is compiled once a machine from ``ops.cpp`` and takes the portable one's place; where no compiler is
found the portable one stays, slower and otherwise equal. On CUDA devices ``cuda.py`` does the same with Triton. Those
over quantised weights are native only: elsewhere models are loaded with full weights.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from .build import load_native
from .portable import PORTABLE, keep_rows, screened_linear
from .shapes import SHAPES

__all__ = ["is_native"]

_library = torch.library.Library("yggdrasil", "DEF")
_library.define("packed_shape(Tensor weight) -> int[]")
_library.define("pack_linear(Tensor weight, Tensor(a!) packed) -> ()")
_library.define("packed_linear(Tensor input, Tensor packed, Tensor? bias, int out_features, int num_threads) -> Tensor")
_library.define("plain_linear(Tensor input, Tensor weight, Tensor? bias, int num_threads) -> Tensor")
_library.define(
    "packed_experts(Tensor input, Tensor chosen, Tensor shares, Tensor gate_up, Tensor down, int inner_features, "
    "bool gelu, int num_threads) -> Tensor"
)
# What linears do beside multiplying.
_AROUND = "Tensor? gate, bool gelu, Tensor? norm, bool plus_one, float eps, Tensor? residual"
_library.define(
    f"packed_linears(Tensor input, {_AROUND}, Tensor[] packed, Tensor?[] biases, int[] out_features, int num_threads) "
    "-> Tensor[]"
)
_library.define(
    "norm_rows(Tensor input, Tensor norm, bool plus_one, float eps, Tensor? residual, int num_threads) -> Tensor"
)
_library.define(
    "packed_best(Tensor input, Tensor packed, Tensor? bias, int out_features, int num_threads) -> (Tensor, Tensor)"
)
_library.define(
    "quantised_best(Tensor input, Tensor packed, Tensor? bias, int out_features, int format, int num_threads) "
    "-> (Tensor, Tensor)"
)
_SCREENED = "Tensor input, Tensor packed, Tensor? bias, Tensor copy, Tensor factors, int out_features, int num_threads"
_library.define("can_screen() -> bool")
_library.define(f"screened_linear({_SCREENED}) -> Tensor")
_library.define(f"screened_best({_SCREENED}) -> (Tensor, Tensor)")
_library.define("quantised_shape(Tensor rows, int format, int inputs) -> int[]")
_library.define("pack_quantised(Tensor rows, int format, int inputs, Tensor(a!) packed) -> ()")
_library.define(
    "quantised_linear(Tensor input, Tensor packed, Tensor? bias, int out_features, int format, int num_threads) "
    "-> Tensor"
)
_library.define(
    f"quantised_linears(Tensor input, {_AROUND}, Tensor[] packed, Tensor?[] biases, int[] out_features, int[] formats, "
    "int num_threads) -> Tensor[]"
)
_library.define(
    "quantised_experts(Tensor input, Tensor chosen, Tensor shares, Tensor[] packed, int[] formats, int inner_features, "
    "bool gelu, int num_threads) -> Tensor"
)
_library.define(
    "quantised_rows(Tensor ids, Tensor packed, int format, int inputs, int num_rows, ScalarType dtype) -> Tensor"
)
_library.define(
    "tree_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor offsets, Tensor tree_mask, float scale, int window, float softcap, int num_threads) -> Tensor"
)
_library.define(
    "rows_attention(Tensor query, Tensor keys, Tensor values, Tensor lengths, float scale, int window, float softcap, "
    "int num_threads) -> Tensor"
)
_library.define("best_tokens(Tensor logits, int num_threads) -> (Tensor, Tensor)")
_library.define("top_candidates(Tensor values, SymInt k) -> (Tensor, Tensor)")
_library.define("open_unit(str name, str path) -> ()")
_library.define("keep_table(Tensor[] tensors) -> int")
_library.define("drop_table(int number) -> ()")
_library.define(
    "run_units(str name, Tensor table, Tensor carried, Tensor[] shared, int[] places, int count, int[] kept) "
    "-> Tensor[]"
)
_PROGRAM = "int[] code, float[] numbers"  # as program_code.h reads them
_library.define(f"run_program(Tensor[] tensors, {_PROGRAM}, int[] results, int num_threads) -> Tensor[]")
_library.define(
    "run_layers(Tensor table, Tensor carried, Tensor[] shared, int[] places, int count, int[] kept, "
    f"{_PROGRAM}, int num_threads) -> Tensor[]"
)
_library.define(  # ``layer_stack.h``
    "keep_stack(Tensor[] tensors, int[] kinds, int[] places, int[] code, int[] code_sizes, float[] numbers, "
    "int[] sizes) -> int"
)
_library.define("drop_stack(int number) -> ()")
_library.define("run_stack(int number, Tensor carried, Tensor[] shared, int[] kept, int num_threads) -> Tensor[]")
_library.define("move_rows(Tensor(a!)[] caches, int[] sources, int destination) -> ()")
_library.define("keep_rows(Tensor(a!)[] caches, Tensor start, Tensor rows, Tensor count) -> ()")
_library.define("rank_nodes(Tensor scores, Tensor(a!) order, Tensor(b!) expected) -> ()")
_library.define("read_words(Tensor buffer, int num_threads) -> int")


@lru_cache(1)
def cuda_operators() -> dict[str, Callable[..., Any]]:
    """Implementations on CUDA devices: Triton kernels where Triton is installed, else the portable ones."""
    functions = {**PORTABLE, "keep_rows": keep_rows}
    try:
        from . import cuda

        cuda.check()
    except (ImportError, RuntimeError, OSError) as error:
        print(f"yggdrasil: no Triton, so attention on the GPU is slower ({error})", file=sys.stderr)  # noqa: T201
        return functions
    return cuda.with_fallback(functions)


def _on_cuda(name: str) -> Callable[..., Any]:
    """The CUDA operator ``name``, looked up when first called: a CPU never imports Triton."""
    return lambda *arguments: cuda_operators()[name](*arguments)


for _name in (*PORTABLE, "keep_rows"):
    _library.impl(_name, _on_cuda(_name), "CUDA")
_library.impl("keep_rows", keep_rows, "CPU")
_library.impl("screened_linear", screened_linear, "CPU")
for _name, _shape in SHAPES.items():
    torch.library.register_fake(f"yggdrasil::{_name}", _shape, lib=_library)

_native = load_native()
if not _native:
    for _name, _function in PORTABLE.items():
        _library.impl(_name, _function, "CPU")


def is_native() -> bool:
    """Whether the CPU operators are the compiled ones."""
    return _native
