"""Converts the weights of a GGUF file to a dequantised checkpoint in Hugging Face layout.

The module uses transformers' tables of tensor transformations, but not its loader, which parses the file four times and
builds its table of names once per module: 30 s for 135M parameters, 5 s here.
"""

from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.checkpoints.gguf.experts import join_experts, name_in_model, split_experts
from yggdrasil.checkpoints.gguf.gemma4 import table_name_parts
from yggdrasil.checkpoints.gguf.recurrent import (
    RECURRENT,
    as_in_model,
    name_in_table,
    shapes_in_file,
    split_joined,
    whole_name_in_table,
)
from yggdrasil.checkpoints.gguf.values import ROPE_FACTORS, other_shape, refuse_other_tensors, values_of
from yggdrasil.checkpoints.shards import ShardWriter

_NUM_SHARDS, _LEAST_SHARD = 8, 64 * 2**20
_LIKE_LLAMAS = ("smollm3", "granite", "granitehybrid")  # query and key rows are permuted as in Llama's files


def write_weights(
    header: GgufHeader, config: PretrainedConfig, folder: Path, dtype: torch.dtype, but: Collection[str] = ()
) -> None:
    """Write the weights of a GGUF file in ``dtype`` as safetensors to ``folder``, with Hugging Face's names and layout.

    About an eighth of the weights is in memory at a time. No config.json is written.

    Args:
        config: transformers' configuration of the model.
        but: transformers' names of weights to leave out.

    Raises:
        YggdrasilError: the file lacks a weight of the model, or has an unknown weight or a weight of another shape.
    """
    total = sum(int(np.prod(tensor.shape)) for tensor in header.tensors.values()) * dtype.itemsize
    writer = ShardWriter(folder, max(_LEAST_SHARD, total // _NUM_SHARDS))
    model = empty_model(config)
    for name, tensor in split_joined(config, join_experts(_weights(header, config, dtype, but), model)):
        writer.add(name, tensor)
    writer.close()


def _weights(
    header: GgufHeader, config: PretrainedConfig, dtype: torch.dtype, but: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (model's name, dequantised weight) in the file's order; gate and up of experts are separate weights."""
    shapes = _expected_shapes(header, config)
    names = tensor_names(header, config, shapes)
    for tensor in sorted(header.tensors.values(), key=lambda each: each.start):
        name = names.get(tensor.name)
        if name is None:
            continue
        if not _is_shaped(tensor.shape, shapes[name]):
            raise other_shape(header, tensor, name, shapes[name])
        if name_in_model(name) not in but:
            values = _as_in_model(header, config, tensor.name, values_of(header, tensor)).reshape(shapes[name])
            yield name, torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def _is_shaped(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a file's shape matches the model's, ignoring dimensions of size 1 and groups of a vector.

    A depthwise convolution is [C, 1, K] in the model and [C, K] in the file, a group norm [G * N] and [G, N].
    """
    sizes = [[size for size in shape if size != 1] for shape in (found, wanted)]
    return sizes[0] == sizes[1] or (len(wanted) == 1 and prod(found) == wanted[0])


def _expected_shapes(header: GgufHeader, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the weights' shapes in the model by name, for weights as the file splits and joins them."""
    shapes = {name: tuple(weight.shape) for name, weight in split_experts(empty_model(config)).items()}
    return shapes_in_file(header.architecture, shapes)


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the transformers model of a configuration on the meta device, without memory for its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def row_order(header: GgufHeader, config: PretrainedConfig, tensor: GgufTensor) -> npt.NDArray[np.int64] | None:
    """Return the permutation [N] with ``model_rows = file_rows[permutation]`` of a GGUF tensor; None for the identity.

    The permutation turns the order of the rows in the file into the order in the transformers model.
    """
    numbers = np.arange(tensor.shape[0])
    order: npt.NDArray[np.int64] = _as_in_model(header, config, tensor.name, numbers[:, None])[:, 0]
    return None if np.array_equal(order, numbers) else order


def _as_in_model(header: GgufHeader, config: PretrainedConfig, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Transform ``values`` of the file's tensor ``name`` to the model's layout."""
    if header.architecture in RECURRENT:
        values = as_in_model(header.architecture, config, name, values)
        if header.architecture not in _LIKE_LLAMAS:
            return values
    order = "llama" if header.architecture in _LIKE_LLAMAS else header.architecture
    processor: Any = TENSOR_PROCESSORS.get(order, TensorProcessor)
    found: npt.NDArray[Any] = processor(config=config.to_dict()).process(values, name).weights
    return found


def tensor_names(
    header: GgufHeader, config: PretrainedConfig, shapes: dict[str, tuple[int, ...]] | None = None
) -> dict[str, str]:
    """Return a map from the name of each tensor of a GGUF file to the name of the transformers weight.

    Tensors of drafting layers are left out. ``shapes`` are the model's weight shapes by name; with None they are
    derived from ``config``.

    Raises:
        YggdrasilError: a weight has no tensor, or a tensor belongs to no weight.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    shapes = _expected_shapes(header, config) if shapes is None else shapes
    kind = next(key for key, value in MODEL_ARCH_NAMES.items() if value == header.architecture)
    table = get_tensor_name_map(kind, config.num_hidden_layers)
    names: dict[str, str] = {}
    for name in shapes:
        whole = whole_name_in_table(config, name)
        stem, _, suffix = whole.rpartition(".")
        bare = table.get_name(whole)  # a parameter not named .weight or .bias
        if suffix == "dt_bias":
            stem, suffix, bare = f"{stem}.dt_proj", "bias", None
        stem, suffix = table_name_parts(stem, suffix)
        theirs = f"{table.get_name(name_in_table(config, stem))}.{suffix}" if bare is None else f"{bare}.weight"
        others = () if bare is None else (bare, f"{bare}.bias")
        names[next((other for other in others if other in header.tensors), theirs)] = name
    drafting = {name for name in header.tensors if _layer_of(name) >= config.num_hidden_layers}
    refuse_other_tensors(header, names, {ROPE_FACTORS, *drafting})
    return names


def _layer_of(name: str) -> int:
    """Return the layer index of the file's tensor ``name``, or -1; drafting layers follow the model's layers."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and parts[1].isdecimal() else -1
