"""The blocks of a GGUF file as they are, in the place of the numbers they stand for."""

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.checkpoints.formats.kinds import FORMATS, Format
from yggdrasil.checkpoints.formats.rows import Quantise, QuantisedRows
from yggdrasil.checkpoints.gguf.checkpoint import empty_model, row_order, tensor_names
from yggdrasil.checkpoints.gguf.recurrent import has_columns_in_turns
from yggdrasil.checkpoints.packing import weights_of

_HEAD, _TABLE = "lm_head.weight", "token_embd.weight"


def blocks_of(header: GgufHeader, config: PretrainedConfig) -> dict[str, GgufTensor]:
    """Where the blocks lie of every weight whose layer reads them, by the weight's name."""
    places = {ours: header.tensors[theirs] for theirs, ours in tensor_names(header, config).items()}
    if config.tie_word_embeddings:  # one table, which is a name of its own where the embedding is not read in blocks
        places.setdefault(_HEAD, header.tensors[_TABLE])
    found: dict[str, GgufTensor] = {}
    for name, module in empty_model(config).named_modules():
        weights = weights_of(name, module)
        if all(weight in places and _is_read(places[weight], config) for weight in weights):
            found |= {weight: places[weight] for weight in weights}
    return found


def _is_read(place: GgufTensor, config: PretrainedConfig) -> bool:
    """Whether a layer reads the blocks as they lie: their order may change by rows, and never within one."""
    return place.kind in FORMATS and not has_columns_in_turns(config, place.name)


def rows_of_file(header: GgufHeader, config: PretrainedConfig) -> Quantise:
    """Every weight whose layer reads blocks, its rows in the order that the model has them in."""
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
