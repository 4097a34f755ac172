"""Quantises the weights of a checkpoint when it is loaded. The model then computes with the quantised weights."""

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
    from transformers import PreTrainedModel  # imports PyTorch's compiler, which later starts do not need

_IN_BLOCKS_OF_32 = {Q.Q4_K: Q.Q5_0, Q.Q5_K: Q.Q5_1, Q.Q6_K: Q.Q8_0}  # if K is not a multiple of 256
_LAYER = re.compile(r"\.(\d+)\.")
_DEAR = ("v_proj.", "down_proj.")  # layers whose quantisation harms the output more than others'


def rounding_to(weights: Weights, model: "PreTrainedModel") -> Quantise:
    """Return a function (parameter name, weight) that quantises weights of ``model`` to the format ``weights``.

    The format is neither "full" nor "file". Embedding and LM head get Q8_0, or Q6_K if ``weights`` is a K format. The
    formats that end in "_m" are llama.cpp's mixes: sensitive projections get Q6_K in every third layer and in the
    first and last eighth of the layers.

    A weight is a linear layer's, [N, K], or that of a mixture's experts, [E, N, K]. If K is no multiple of 256, a
    format with blocks of 32 replaces a K format. If K is no multiple of 32, the function returns None, and the weight
    stays unquantised. With a K format the function raises YggdrasilError if ggml is not installed.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(end.weight) for end in ends if isinstance(end, nn.Embedding | nn.Linear)}
    is_mix = weights in K_FORMATS
    chosen, table = Q[weights.removesuffix("_m").upper()], Q.Q6_K if is_mix else Q.Q8_0

    def round_weight(name: str, weight: Tensor) -> QuantisedRows | None:
        form = chosen
        if id(weight) in tables:
            form = table
        elif weights.endswith("_m"):
            form = _mixed(chosen, name, model.config.num_hidden_layers)
        num_inputs = weight.shape[-1]
        if num_inputs % BLOCKS[form][0]:
            form = _IN_BLOCKS_OF_32.get(form, form)
        if num_inputs % BLOCKS[form][0]:
            return None
        round_rows = quantise_by_ggml if is_mix else _quantise
        # One expert at a time: float32 copies of all would take more memory than the model.
        matrices = [weight] if weight.dim() == 2 else weight
        blocks = [torch.from_numpy(round_rows(each.detach().float().contiguous().numpy(), form)) for each in matrices]
        return QuantisedRows(form, blocks[0] if weight.dim() == 2 else torch.stack(blocks))

    return round_weight


def quantised_to_q4_1(name: str, weight: Tensor) -> QuantisedRows | None:
    """Return a weight [N, K] quantised to Q4_1, or None if it is [E, N, K] or K is no multiple of 32."""
    if weight.dim() != 2 or weight.shape[1] % BLOCKS[Q.Q4_1][0]:
        return None
    return QuantisedRows(Q.Q4_1, torch.from_numpy(_quantise(weight.detach().float().numpy(), Q.Q4_1)))


def _quantise(values: npt.NDArray[np.float32], form: Q) -> npt.NDArray[np.uint8]:
    """Quantise ``values`` [N, K] with the ``gguf`` package, and return [N, bytes]."""
    from gguf import GGMLQuantizationType, quants  # imported late: only quantised weights need it

    return quants.quantize(values, GGMLQuantizationType(form))


def _mixed(base: Q, name: str, num_layers: int) -> Q:
    """Return the format of layer ``name`` in llama.cpp's mix of formats around ``base``."""
    if "qkv_proj." in name:
        return Q.Q5_K if base == Q.Q4_K else Q.Q6_K
    place = _LAYER.search(name)
    if place is None or not any(dear in name for dear in _DEAR):
        return base
    number, eighth = int(place[1]), num_layers // 8
    is_dear = number < eighth or number >= 7 * num_layers // 8 or (number - eighth) % 3 == 2
    return Q.Q6_K if is_dear else base
