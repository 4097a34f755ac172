"""The blocks of a GGUF file as they are, in the place of the numbers they stand for."""

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import PretrainedConfig

from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.models.formats.rows import FORMATS, Quantise, QuantisedRows
from yggdrasil.models.gguf_checkpoint import row_order, tensor_names

_HEAD, _TABLE = "lm_head.weight", "token_embd.weight"


def keeps_blocks(header: GgufHeader) -> bool:
    """Whether the layers of the file are in formats that the kernels read."""
    return any(tensor.kind in FORMATS for name, tensor in header.tensors.items() if name.startswith("blk."))


def rows_of_file(header: GgufHeader, config: PretrainedConfig) -> Quantise:
    """Every weight whose format the kernels read, its rows in the order that the model has them in."""
    places = {ours: header.tensors[theirs] for theirs, ours in tensor_names(header, config).items()}
    if config.tie_word_embeddings:  # one table, which is a name of its own where the embedding is not read in blocks
        places.setdefault(_HEAD, header.tensors[_TABLE])

    def read(name: str, weight: Tensor) -> QuantisedRows | None:
        place = places.get(name)
        if place is None or place.kind not in FORMATS:
            return None
        assert place.shape == tuple(weight.shape), f"{name}: {place.shape = }, {weight.shape = }"
        blocks = np.fromfile(header.path, dtype=np.uint8, count=place.num_bytes, offset=place.start)
        blocks = blocks.reshape(place.shape[0], -1)
        order = row_order(header, config, place)
        blocks = blocks if order is None else blocks[order]
        return QuantisedRows(GGMLQuantizationType(place.kind), torch.from_numpy(blocks))

    return read
