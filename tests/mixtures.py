"""Small random mixtures, attention sinks and Gemma 4, as models ready for the engine beside untouched copies."""

import copy
from functools import cache

import torch
from recurrent_models import RecurrentModel
from tiny import sharpened, tiny_config
from tiny_pair import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from yggdrasil.runtime.loading import prepare_model

MIXTURES = ("gpt_oss", "qwen3_moe", "mixtral", "gemma4")


@cache
def mixture_model(family):
    config = tiny_config(family)
    for field in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(config, field):
            setattr(config, field, VOCAB_SIZE)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, None
    torch.manual_seed(0)
    model = sharpened(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), 4)
    return RecurrentModel(prepare_model(copy.deepcopy(model), family, 1), model)
