"""Quantises to GGUF's K formats with the ggml library that the package ``llama-cpp-python`` includes.

The ``gguf`` package can dequantise these formats but not quantise to them.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from yggdrasil.checkpoints.formats.kinds import BLOCKS, Format
from yggdrasil.errors import YggdrasilError

_NAMES = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll")


def has_ggml() -> bool:
    """Return whether the ggml library of ``llama-cpp-python`` is installed, without loading it."""
    return _library() is not None


def quantise_by_ggml(weight: npt.NDArray[np.float32], form: Format) -> npt.NDArray[np.uint8]:
    """Quantise ``weight`` [N, K] float32 with ggml, and return its rows of GGUF blocks, [N, bytes] uint8.

    K must be a multiple of the format's block size. The format must not require an importance matrix.

    Raises:
        YggdrasilError: the library is missing or cannot be loaded.
    """
    block_inputs, block_bytes = BLOCKS[form]
    num_rows, num_inputs = weight.shape
    assert num_inputs % block_inputs == 0, f"{num_inputs = } {form = }"
    source = np.ascontiguousarray(weight, dtype=np.float32)
    blocks = np.empty((num_rows, num_inputs // block_inputs * block_bytes), dtype=np.uint8)
    written = _quantize_chunk()(form, source.ctypes.data, blocks.ctypes.data, 0, num_rows, num_inputs, None)
    assert written == blocks.nbytes, f"{written = } {blocks.nbytes = }"
    return blocks


def _library() -> Path | None:
    """Return the path of the ggml library, or None if it is not installed."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    return next((folder / name for name in _NAMES if (folder / name).exists()), None)


@cache
def _quantize_chunk() -> "ctypes._NamedFuncPointer":
    """Load the ggml library and return ``ggml_quantize_chunk``. Raises YggdrasilError if the library fails."""
    path = _library()
    if path is None:
        raise YggdrasilError("K formats need ggml, which is not installed: pip install llama-cpp-python")
    try:
        function = ctypes.CDLL(str(path)).ggml_quantize_chunk
    except (OSError, AttributeError) as error:
        raise YggdrasilError(f"{path} does not work ({error}); install llama-cpp-python again") from error
    size, rows, pointer = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p
    function.argtypes = (ctypes.c_int, pointer, pointer, rows, rows, rows, pointer)
    function.restype = size
    return function
