"""Read a GGUF file's quantised blocks unchanged, for layers with quantised weights."""

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.checkpoints.formats.kinds import FORMATS, Format
from yggdrasil.checkpoints.formats.rows import Quantise, QuantisedRows
from yggdrasil.checkpoints.gguf.checkpoint import empty_model, row_order, tensor_names
from yggdrasil.checkpoints.gguf.recurrent import has_permuted_columns
from yggdrasil.checkpoints.packing import weights_of

_HEAD, _TABLE = "lm_head.weight", "token_embd.weight"


def blocks_of(header: GgufHeader, config: PretrainedConfig) -> dict[str, GgufTensor]:
    """Return the file's tensors of all weights whose layers read quantised blocks, by the model's weight name."""
    places = {ours: header.tensors[theirs] for theirs, ours in tensor_names(header, config).items()}
    if config.tie_word_embeddings:  # the LM head reads the embedding's tensor
        places.setdefault(_HEAD, header.tensors[_TABLE])
    found: dict[str, GgufTensor] = {}
    for name, module in empty_model(config).named_modules():
        weights = weights_of(name, module)
        if all(weight in places and _is_read(places[weight], config) for weight in weights):
            found |= {weight: places[weight] for weight in weights}
    return found


def _is_read(place: GgufTensor, config: PretrainedConfig) -> bool:
    """Return whether kernels can read the tensor's blocks: rows may be permuted, but not the inputs within a row."""
    return place.kind in FORMATS and not has_permuted_columns(config, place.name)


def rows_of_file(header: GgufHeader, config: PretrainedConfig) -> Quantise:
    """Return a function (name, weight) -> QuantisedRows or None that reads a weight's quantised blocks from the file.

    Rows are permuted to the model's order. It returns None for weights whose layers do not read blocks.
    """
    places = blocks_of(header, config)

    def read(name: str, weight: Tensor) -> QuantisedRows | None:
        place = places.get(name)
        if place is None:
            return None
        assert place.shape == tuple(weight.shape), f"{name}: {place.shape = }, {weight.shape = }"
        blocks = np.fromfile(header.path, dtype=np.uint8, count=place.num_bytes, offset=place.start)
        blocks = blocks.reshape(*place.shape[:-1], -1)
        order = row_order(header, config, place)
        blocks = blocks if order is None else blocks[order]
        return QuantisedRows(Format(place.kind), torch.from_numpy(blocks))

    return read
