"""Weights of a checkpoint rounded to a format of fewer bits when it is loaded: another model than the checkpoint's."""

import re
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from yggdrasil.checkpoints.formats.ggml import quantise_by_ggml
from yggdrasil.checkpoints.formats.kinds import BLOCKS
from yggdrasil.checkpoints.formats.kinds import Format as Q
from yggdrasil.checkpoints.formats.names import K_FORMATS, Weights
from yggdrasil.checkpoints.formats.rows import Quantise, QuantisedRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # brings a compiler along, which a second start has no use for

_IN_BLOCKS_OF_32 = {Q.Q4_K: Q.Q5_0, Q.Q5_K: Q.Q5_1, Q.Q6_K: Q.Q8_0}  # where inputs are not whole blocks of 256
_LAYER = re.compile(r"\.(\d+)\.")
_DEAR = ("v_proj.", "down_proj.")  # layers that suffer more than others


def rounding_to(weights: Weights, model: "PreTrainedModel") -> Quantise:
    """Round every linear layer as the ``gguf`` package does; the embedding and the head to no less than 8 bits.

    The mixes of K formats are llama.cpp's: 6 bits for the embedding and the head, and in every third layer and those
    near both ends for what suffers most. A layer whose inputs are not whole blocks stays as it is.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(end.weight) for end in ends if isinstance(end, nn.Embedding | nn.Linear)}
    is_mix = weights in K_FORMATS
    chosen, table = Q[weights.removesuffix("_m").upper()], Q.Q6_K if is_mix else Q.Q8_0

    def round_weight(name: str, weight: Tensor) -> QuantisedRows | None:
        if weight.dim() != 2:  # experts stay full
            return None
        form = chosen
        if id(weight) in tables:
            form = table
        elif weights.endswith("_m"):
            form = _mixed(chosen, name, model.config.num_hidden_layers)
        num_inputs = weight.shape[1]
        if num_inputs % BLOCKS[form][0]:
            form = _IN_BLOCKS_OF_32.get(form, form)
        if num_inputs % BLOCKS[form][0]:
            return None
        values = weight.detach().float().contiguous().numpy()
        round_rows = quantise_by_ggml if is_mix else _quantise
        return QuantisedRows(form, torch.from_numpy(round_rows(values, form)))

    return round_weight


def in_four_bits(name: str, weight: Tensor) -> QuantisedRows | None:
    """Round a layer's weight to Q4_1; experts, and one whose inputs are not whole blocks, stay as they are."""
    if weight.dim() != 2 or weight.shape[1] % BLOCKS[Q.Q4_1][0]:
        return None
    return QuantisedRows(Q.Q4_1, torch.from_numpy(_quantise(weight.detach().float().numpy(), Q.Q4_1)))


def _quantise(values: npt.NDArray[np.float32], form: Q) -> npt.NDArray[np.uint8]:
    from gguf import GGMLQuantizationType, quants  # here: full weights need no such package

    return quants.quantize(values, GGMLQuantizationType(form))


def _mixed(base: Q, name: str, num_layers: int) -> Q:
    """The format of a layer in a mix around ``base``, by its place: some get more bits than others."""
    if "qkv_proj." in name:
        return Q.Q5_K if base == Q.Q4_K else Q.Q6_K
    place = _LAYER.search(name)
    if place is None or not any(dear in name for dear in _DEAR):
        return base
    number, eighth = int(place[1]), num_layers // 8
    is_dear = number < eighth or number >= 7 * num_layers // 8 or (number - eighth) % 3 == 2
    return Q.Q6_K if is_dear else base
