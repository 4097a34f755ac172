"""Weights of a checkpoint rounded to a format of fewer bits when it is loaded: another model than the checkpoint's."""

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor, nn
from transformers import PreTrainedModel

from yggdrasil.models.formats.names import Weights
from yggdrasil.models.formats.rows import Quantise, QuantisedRows

_TABLE = GGMLQuantizationType.Q8_0  # of the vocabulary's tables, which suffer most


def rounding_to(weights: Weights, model: PreTrainedModel) -> Quantise:
    """Round every linear layer as the ``gguf`` package does; the embedding and the head to no less than 8 bits.

    A layer whose inputs are not whole blocks stays as it is.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(end.weight) for end in ends if isinstance(end, nn.Embedding | nn.Linear)}
    chosen = GGMLQuantizationType[weights.upper()]

    def round_weight(_: str, weight: Tensor) -> QuantisedRows | None:
        form = _TABLE if id(weight) in tables else chosen
        if weight.shape[1] % GGML_QUANT_SIZES[form][0]:
            return None
        blocks = quants.quantize(weight.detach().float().contiguous().numpy(), form)
        return QuantisedRows(form, torch.from_numpy(blocks))

    return round_weight
