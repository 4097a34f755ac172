"""Small random models of ``tiny.FAMILIES``, as models ready for the engine beside untouched copies."""

import copy
from functools import cache

import torch
from recurrent_models import RecurrentModel
from tiny import sharpened, tiny_config
from tiny_pair import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from yggdrasil.runtime.loading import prepare_model

MIXTURES = ("gpt_oss", "qwen3_moe", "mixtral", "gemma4")
# (seed, factor of matrices, factor of the embedding), so that texts do not repeat a few tokens.
_USUAL = (0, 4, 1.0)
_CHOSEN = {
    "llama": (0, 6, 1.0), "qwen2": (1, 6, 1.0), "qwen3": (2, 6, 0.1), "gemma2": (0, 4, 0.1), "gemma3": (0, 4, 0.1),
    "phi3": (0, 6, 1.0), "gpt2": (0, 4, 0.1), "smollm3": (0, 6, 0.1), "cohere2": (0, 4, 0.1), "glm4": (1, 6, 1.0),
    "ernie4_5": (0, 6, 0.1), "phi": (4, 4, 1.0), "starcoder2": (4, 6, 0.1), "olmoe": (2, 6, 0.1),
    "mixtral": (3, 4, 1.0), "qwen3_moe": (1, 6, 0.1),
}  # fmt: skip


@cache
def mixture_model(family):
    """A model of ``family``, one of ``tiny.FAMILIES``."""
    config = tiny_config(family)
    for field in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(config, field):
            setattr(config, field, VOCAB_SIZE)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, None
    seed, factor, embedding = _CHOSEN.get(family, _USUAL)
    torch.manual_seed(seed)
    model = sharpened(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), factor)
    model.get_input_embeddings().weight.data.mul_(embedding)
    return RecurrentModel(prepare_model(copy.deepcopy(model), family, 1), model)
