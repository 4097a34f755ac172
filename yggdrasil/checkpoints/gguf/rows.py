"""Reads a GGUF file's quantised blocks unchanged, for layers with quantised weights."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PretrainedConfig

from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.checkpoints.formats.kinds import FORMATS, Format
from yggdrasil.checkpoints.formats.rows import Quantise, QuantisedRows
from yggdrasil.checkpoints.gguf.checkpoint import empty_model, row_order, tensor_names
from yggdrasil.checkpoints.gguf.experts import names_in_file
from yggdrasil.checkpoints.gguf.recurrent import has_permuted_columns
from yggdrasil.checkpoints.packing import weights_of

_HEAD, _TABLE = "lm_head.weight", "token_embd.weight"


def blocks_of(header: GgufHeader, config: PretrainedConfig) -> dict[str, list[GgufTensor]]:
    """Return the tensors of a GGUF file whose quantised blocks the kernels read, by transformers' weight name.

    A weight has several tensors if the model fuses layers that the file stores separately; the weight's rows are the
    rows of these tensors in order. A tied LM head has the embedding's tensor.

    Raises:
        YggdrasilError: the file lacks a weight of the model or has an unknown one.
    """
    places = {ours: header.tensors[theirs] for theirs, ours in tensor_names(header, config).items()}
    if config.tie_word_embeddings:  # the LM head reads the embedding's tensor
        places.setdefault(_HEAD, header.tensors[_TABLE])
    found: dict[str, list[GgufTensor]] = {}
    for name, module in empty_model(config).named_modules():
        parts = {weight: names_in_file(weight) for weight in weights_of(name, module)}
        lying = {weight: [places[part] for part in names if part in places] for weight, names in parts.items()}
        if all(_is_read(header, lying[weight], len(names), config) for weight, names in parts.items()):
            found |= lying
    return found


def _is_read(header: GgufHeader, places: list[GgufTensor], count: int, config: PretrainedConfig) -> bool:
    """Return whether kernels can read all ``count`` tensors of a weight: one format, columns not permuted."""
    are_blocks = all(
        each.kind in FORMATS and not has_permuted_columns(header.architecture, config, each.name) for each in places
    )
    return len(places) == count and are_blocks and len({each.kind for each in places}) == 1


def rows_of_file(header: GgufHeader, config: PretrainedConfig) -> Quantise:
    """Return a function (weight name, weight) that reads the weight's rows of quantised blocks from a GGUF file.

    Rows are permuted to the model's order. The function returns None for weights whose layers do not read blocks.
    """
    places = blocks_of(header, config)

    def rows(name: str, weight: Tensor) -> QuantisedRows | None:
        parts = places.get(name)
        if parts is None:
            return None
        read = [_blocks(header, config, part) for part in parts]
        blocks = read[0] if len(read) == 1 else np.concatenate(read, axis=-2)
        assert blocks.shape[:-1] == tuple(weight.shape[:-1]), f"{name}: {blocks.shape = }, {weight.shape = }"
        return QuantisedRows(Format(parts[0].kind), torch.from_numpy(blocks))

    return rows


def _blocks(header: GgufHeader, config: PretrainedConfig, place: GgufTensor) -> npt.NDArray[np.uint8]:
    """Read the rows of blocks [..., N, bytes] of one tensor, in the model's order."""
    blocks = np.fromfile(header.path, dtype=np.uint8, count=place.num_bytes, offset=place.start)
    blocks = blocks.reshape(*place.shape[:-1], -1)
    order = row_order(header, config, place)
    return blocks if order is None else blocks[order]
