"""The CPU operators of the native library as Python functions, by name."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from yggdrasil.library.build import Native, check
from yggdrasil.library.packing import PANELS, pair_bytes
from yggdrasil.native.calls import SCHEMAS, SHAPES, call_of

_PANEL, _TILE_PAIRS = 16, 16  # outputs per panel; bfloat16 panels are padded to a multiple of this many input pairs
_WITHOUT_RESULT_SHAPES = ("pack_linear", "pack_quantised", "move_rows", "rank_nodes", "read_words", "commit_states")
# Operators that are not a single C call: implemented in PyTorch, or by functions below.
_NOT_CALLS = {"packed_shape", "quantised_shape", "has_byte_products", "keep_rows", "keep_stack", "reweigh"}
_stacks: dict[int, Sequence[Tensor]] = {}  # tensors of each registered stack of layers, to keep them alive


def native_operators() -> dict[str, Callable[..., Any]]:
    """Return the operators over CPU tensors of the native library, which must be loaded, name -> function."""
    calls = {name: _call(name) for name in SCHEMAS if name not in _NOT_CALLS}
    return {**calls, "packed_shape": packed_shape, "quantised_shape": quantised_shape}


def native_functions() -> dict[str, Callable[..., Any]]:
    """Return the native library's operators that compute nothing on tensors, name -> function.

    They are ``has_byte_products``, and ``keep_stack``, which only stores tensors.
    """
    keep_layers = _call("keep_stack")

    def keep_stack(tensors: Sequence[Tensor], *described: Sequence[Any]) -> int:
        """Register a model's stack of layers in the native library, and return its number.

        ``tensors`` are the layers' tensors, which stay alive until ``drop_stack``; ``described`` is their bytecode, in
        parts (layers/layer_stack.h).
        """
        held = [tensor.detach() for tensor in tensors]
        number: int = keep_layers(held, *described)
        _stacks[number] = held
        return number

    return {"has_byte_products": has_byte_products, "keep_stack": keep_stack}


def drop_stack(number: int) -> None:
    """Free the stack of layers that the operator ``keep_stack`` registered as ``number``.

    ``drop_stack`` is no operator: garbage collection may call it while a step is traced, and the trace would record an
    operator.
    """
    assert Native.library is not None
    check(Native.library.yggdrasil_drop_stack(ctypes.c_int64(number)))
    _stacks.pop(number, None)


def packed_shape(weight: Tensor) -> list[int]:
    """Return the shape of the packed form of a linear layer's ``weight`` [N, K] (linear/linear_job.h).

    A panel is 16 outputs. float32: [panels, K, 16]; bfloat16: [panels, pairs of inputs, 16, 2], where the number of
    pairs is rounded up to a multiple of 16.

    Raises:
        RuntimeError: ``weight`` is not two-dimensional, or is bfloat16 with an odd number of inputs.
    """
    if weight.dim() != 2:
        raise RuntimeError(f"weight must be [N, K], not {list(weight.shape)}")
    outputs, inputs = weight.shape
    panels = -(-outputs // _PANEL)
    if weight.dtype != torch.bfloat16:
        return [panels, inputs, _PANEL]
    if inputs % 2:
        raise RuntimeError("packing in pairs needs an even number of inputs")
    return [panels, -(-inputs // 2 // _TILE_PAIRS) * _TILE_PAIRS, _PANEL, 2]


def quantised_shape(rows: Tensor, form: int, inputs: int) -> list[int]:
    """Return the shape of the packed form of ``rows`` [N, bytes]: [pairs of panels of 16 rows, bytes per pair].

    Args:
        rows: quantised blocks as in a GGUF file.
        form: GGUF type number of the blocks.
        inputs: number of weights of a row.

    Raises:
        RuntimeError: the library does not support the format, or the format with this number of weights.
    """
    return [-(-rows.shape[0] // PANELS), pair_bytes(form, inputs)]


def has_byte_products() -> bool:
    """Return whether the native library multiplies bytes by integer instructions, which the bounded argmax needs."""
    return Native.library is not None and bool(Native.library.yggdrasil_has_byte_products())


def _call(name: str) -> Callable[..., Any]:
    schema = torch._C.parse_schema(f"yggdrasil::{SCHEMAS[name]}")
    shape = None if name in _WITHOUT_RESULT_SHAPES else SHAPES.get(name)
    return call_of(name, schema, shape, threads=name.startswith("pack_"))
