"""Checks that models, their caches and CUDA graphs fit a GPU's memory, before anything is loaded.

The sizes of weights are read from the headers of the checkpoints. The size of CUDA graphs is an estimate.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from safetensors import safe_open

from yggdrasil.artifacts.gguf import read_gguf_layout
from yggdrasil.artifacts.models import weight_files
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.mxfp4 import BLOCKS as MXFP4_BLOCKS
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import has_triton
from yggdrasil.runtime.memory_limits import free_bytes, kv_bytes
from yggdrasil.runtime.native_steps.loading import sizes_of

# Mean bits of a weight, block scales included. The mixes q5_k_m and q4_k_m have some layers of more bits.
_BITS = {"q8_0": 8.5, "q6_k": 6.57, "q5_k_m": 5.7, "q5_1": 6.0, "q5_0": 5.5, "q4_k_m": 4.9, "q4_1": 5.0, "q4_0": 4.5}
_GRAPHS = 256 << 20  # bytes for CUDA graphs, compiled kernels and workspaces of libraries
_LOGITS_COPIES = 3  # logits of a pass, in float32, that exist at once when tokens are sampled


class ToLoad(NamedTuple):
    """A model that is about to be loaded to a GPU."""

    source: Source
    weights: Weights
    is_there: bool = False  # whether the model's weights are already on the GPU


def check_card(
    models: Sequence[ToLoad], dtype: torch.dtype, device: torch.device, max_length: int, capacity: int, rows: int
) -> None:
    """Check that ``models``, their KV caches and their CUDA graphs fit in a GPU's free memory.

    Nothing is checked on a CPU.

    Args:
        models: the models to load, the target first.
        dtype: dtype of unquantised weights and of KV caches.
        max_length: longest text in tokens, for the message.
        capacity: slots of each KV cache.
        rows: number of rows of the widest pass.

    Raises:
        YggdrasilError: the models do not fit. The message has the sizes of weights, KV caches and CUDA graphs.
    """
    free = None if device.type == "cpu" else free_bytes(device)
    if free is None:
        return
    weights = sum(0 if each.is_there else weight_bytes(each.source, dtype, _loaded_as(each)) for each in models)
    sizes = [sizes_of(each.source) for each in models]
    caches = sum(kv_bytes(each, dtype, capacity) for each in sizes)
    graphs = _GRAPHS + sum(4 * _LOGITS_COPIES * rows * each.vocab_size for each in sizes)
    if weights + caches + graphs <= free:
        return
    names = " and ".join(each.source.given for each in models)
    raise YggdrasilError(
        f"{names} would take about {weights / 1e9:.1f} GB for weights, {caches / 1e9:.1f} GB for KV caches of "
        f"{max_length} tokens and {graphs / 1e9:.1f} GB for CUDA graphs, but {free / 1e9:.1f} GB of the GPU's memory "
        "are free; take --weights q8_0 or another format, less --max-length, a smaller model, or --device cpu"
    )


def _loaded_as(model: ToLoad) -> Weights:
    """Return the format in which a GPU holds the weights: without Triton a file's blocks are dequantised."""
    return "full" if model.weights == "file" and not has_triton() else model.weights


def weight_bytes(source: Source, dtype: torch.dtype, weights: Weights) -> int:
    """Return the approximate size in bytes of a checkpoint's weights once they are loaded in the format ``weights``.

    Args:
        dtype: dtype of weights that stay unquantised.
    """
    return sum(_bytes_of(shape, stored, dtype, weights) for shape, stored in _tensors(source))


def _bytes_of(shape: Sequence[int], stored: int, dtype: torch.dtype, weights: Weights) -> int:
    count = math.prod(shape)
    if len(shape) < 2 or weights == "full":
        return count * dtype.itemsize
    return stored if weights == "file" else int(count * _BITS[weights] / 8)


def _tensors(source: Source) -> list[tuple[Sequence[int], int]]:
    """Return (shape, stored bytes) of every tensor of a checkpoint; MXFP4 blocks count two weights for each byte."""
    if source.gguf is not None:
        return [(each.shape, each.num_bytes) for each in read_gguf_layout(source.gguf).tensors.values()]
    found: list[tuple[Sequence[int], int]] = []
    for file in weight_files(source.folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                part = opened.get_slice(name)
                shape = part.get_shape()
                is_packed = name.endswith(MXFP4_BLOCKS)
                found.append(
                    ([*shape, 2] if is_packed else shape, math.prod(shape) * _ITEM_BYTES.get(part.get_dtype(), 2))
                )
    return found


_ITEM_BYTES = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}  # others have 2 bytes
