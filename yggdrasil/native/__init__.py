"""The operators of static-shape steps, registered as ``torch.ops.yggdrasil``.

Each operator has a schema and a shape function, and most have a portable implementation in PyTorch for any device. On
CPUs, functions of the native library replace the portable ones (``yggdrasil.library``, ``calls.py``); without a library
and a compiler the slower portable ones are used. On CUDA devices, Triton kernels replace five of the portable
implementations (``cuda.py``).
Operators that only native steps call, and operators over quantised weights on CPUs, have only native implementations:
without the native library, a CPU runs no native steps and no quantised weights.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from yggdrasil.library.build import Native, load_native

from .calls import SCHEMAS, SHAPES
from .operators import native_functions, native_operators
from .portable import PORTABLE, keep_rows, reweigh
from .portable_quantised import ON_GPUS

__all__ = ["has_triton", "is_native"]

_library = torch.library.Library("yggdrasil", "DEF")
for _schema in SCHEMAS.values():
    _library.define(_schema)


@lru_cache(1)
def cuda_operators() -> dict[str, Callable[..., Any]]:
    """Return the operators for CUDA devices, name -> function: portable ones, five of them in Triton if Triton works.

    Without Triton the first call prints a warning to stderr.
    """
    functions = {**PORTABLE, **ON_GPUS, "keep_rows": keep_rows}
    try:
        from . import cuda

        cuda.check()
    except (ImportError, RuntimeError, OSError) as error:
        print(f"yggdrasil: no Triton, so attention on the GPU is slower ({error})", file=sys.stderr)  # noqa: T201
        return functions
    return cuda.with_fallback(functions)


def has_triton() -> bool:
    """Return whether Triton works here, so that five operators on CUDA devices run Triton kernels."""
    return cuda_operators()["quantised_linear"] is not ON_GPUS["quantised_linear"]


def _on_cuda(name: str) -> Callable[..., Any]:
    """Return a function that looks up the CUDA operator ``name`` when called, so that CPUs do not import Triton."""
    return lambda *arguments: cuda_operators()[name](*arguments)


for _name in (*PORTABLE, *ON_GPUS, "keep_rows"):
    _library.impl(_name, _on_cuda(_name), "CUDA")
_library.impl("keep_rows", keep_rows, "CPU")
for _name, _shape in SHAPES.items():
    torch.library.register_fake(f"yggdrasil::{_name}", _shape, lib=_library)

_native = Native.library is not None or load_native()
if _native:
    for _name, _function in {**native_operators(), "reweigh": reweigh}.items():
        _library.impl(_name, _function, "CPU")
    for _name, _function in native_functions().items():
        _library.impl(_name, _function, "CompositeExplicitAutograd")
else:
    for _name, _function in PORTABLE.items():
        _library.impl(_name, _function, "CPU")


def is_native() -> bool:
    """Return whether operators on the CPU are those of the native (C++) library, not PyTorch functions."""
    return _native
