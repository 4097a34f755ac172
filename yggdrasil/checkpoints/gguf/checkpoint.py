"""The weights of a GGUF file as those of a checkpoint in Hugging Face layout, dequantised.

transformers reads such a file too, and its tables are used here. Its loader parses the file four times and builds its
table of names once a module: 30 s for 135M parameters where this takes five.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.checkpoints.gguf.config import ROPE_FACTORS
from yggdrasil.checkpoints.gguf.experts import apart, together
from yggdrasil.checkpoints.gguf.recurrent import RECURRENT, as_in_model
from yggdrasil.checkpoints.gguf.values import values_of
from yggdrasil.checkpoints.shards import ShardWriter
from yggdrasil.errors import YggdrasilError

_NUM_SHARDS, _LEAST_SHARD = 8, 64 * 2**20
_LIKE_LLAMAS = ("smollm3", "granite")  # rows of queries and keys in the order that Llama's files have them in


def write_weights(
    header: GgufHeader, config: PretrainedConfig, folder: Path, dtype: torch.dtype, but: Collection[str] = ()
) -> None:
    """Write every weight of the model in ``dtype`` as safetensors, an eighth of it in memory at a time.

    Those named by ``but``, which are read from the file itself, are left out.

    Raises:
        YggdrasilError: the file lacks a weight of the model, holds one that is not the model's, or of another shape.
    """
    total = sum(int(np.prod(tensor.shape)) for tensor in header.tensors.values()) * dtype.itemsize
    writer = ShardWriter(folder, max(_LEAST_SHARD, total // _NUM_SHARDS))
    model = empty_model(config)
    for name, tensor in together(_weights(header, config, dtype, but), model):
        writer.add(name, tensor)
    writer.close()


def _weights(
    header: GgufHeader, config: PretrainedConfig, dtype: torch.dtype, but: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    shapes = _expected_shapes(config)
    names = tensor_names(header, config, shapes)
    for tensor in sorted(header.tensors.values(), key=lambda each: each.start):
        name = names.get(tensor.name)
        if name is None:
            continue
        if _without_ones(tensor.shape) != _without_ones(shapes[name]):
            raise YggdrasilError(
                f"{shown(header.path)}: the tensor {tensor.name} has the shape {list(tensor.shape)} where the model "
                f"({name}) has {list(shapes[name])}; the file is damaged or its facts are of another model"
            )
        if name not in but:
            values = _as_in_model(header, config, tensor.name, values_of(header, tensor))
            yield name, torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A convolution of one channel each is [C, 1, K] in the model, and [C, K] in a file."""
    return tuple(size for size in shape if size != 1)


def _expected_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The weights of the model by name, those of experts as files hold them; tied ones once."""
    return {name: tuple(weight.shape) for name, weight in apart(empty_model(config)).items()}


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model without its numbers."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def row_order(header: GgufHeader, config: PretrainedConfig, tensor: GgufTensor) -> npt.NDArray[np.int64] | None:
    """Which of the file's rows each of the model's is; None where they are in one order.

    What is done to rows on the way to the model is done here to their numbers.
    """
    numbers = np.arange(tensor.shape[0])
    order: npt.NDArray[np.int64] = _as_in_model(header, config, tensor.name, numbers[:, None])[:, 0]
    return None if np.array_equal(order, numbers) else order


def _as_in_model(header: GgufHeader, config: PretrainedConfig, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``values`` of the file's tensor ``name`` as the model has them."""
    if header.architecture in RECURRENT:
        return as_in_model(config, name, values)
    order = "llama" if header.architecture in _LIKE_LLAMAS else header.architecture
    processor: Any = TENSOR_PROCESSORS.get(order, TensorProcessor)
    found: npt.NDArray[Any] = processor(config=config.to_dict()).process(values, name).weights
    return found


def tensor_names(
    header: GgufHeader, config: PretrainedConfig, shapes: dict[str, tuple[int, ...]] | None = None
) -> dict[str, str]:
    """The model's name of every tensor in the file; YggdrasilError where one has none, or a weight has no tensor."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    shapes = _expected_shapes(config) if shapes is None else shapes
    kind = next(key for key, value in MODEL_ARCH_NAMES.items() if value == header.architecture)
    table = get_tensor_name_map(kind, config.num_hidden_layers)
    names: dict[str, str] = {}
    for name in shapes:
        stem, _, suffix = name.rpartition(".")
        bare = table.get_name(name)  # a parameter that is no layer's weight or bias
        if suffix == "dt_bias":
            stem, suffix, bare = f"{stem}.dt_proj", "bias", None
        theirs = f"{table.get_name(stem)}.{suffix}" if bare is None else f"{bare}.weight"
        names[bare if bare in header.tensors else theirs] = name
    missing = sorted(names.keys() - header.tensors.keys())
    drafting = {name for name in header.tensors if _layer_of(name) >= config.num_hidden_layers}
    unknown = sorted(header.tensors.keys() - names.keys() - {ROPE_FACTORS} - drafting)
    if missing or unknown:
        what = f"lacks {_listed(missing)}" if missing else f"holds {_listed(unknown)}, unknown to this architecture"
        raise YggdrasilError(f"{shown(header.path)} {what}; it cannot be loaded as {header.architecture}")
    return names


def _layer_of(name: str) -> int:
    """The layer that the file's tensor ``name`` belongs to, -1 of none; behind a model's own lie those that draft."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and parts[1].isdecimal() else -1


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
