"""Small random models of the families that are served, in float32, with logits that are not flat."""

from functools import cache

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB_SIZE = 97
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_WINDOWED_GEMMA = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}

FAMILIES = {
    "llama": ("LlamaConfig", _SHAPE),
    "qwen2": ("Qwen2Config", _SHAPE),
    "qwen3": ("Qwen3Config", {**_SHAPE, "head_dim": 32}),
    "mistral": ("MistralConfig", {**_SHAPE, "sliding_window": 7}),
    "gemma2": ("Gemma2Config", {**_SHAPE, **_WINDOWED_GEMMA, "attn_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_SHAPE, **_WINDOWED_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("Phi3Config", {**_SHAPE, "pad_token_id": 0, "sliding_window": None}),
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("GPTNeoXConfig", {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}),
    "olmo2": ("Olmo2Config", _SHAPE),
    "olmo3": ("Olmo3Config", {**_SHAPE, "sliding_window": 6}),
    "smollm3": ("SmolLM3Config", {**_SHAPE, "pad_token_id": 0, "no_rope_layer_interval": 2}),
    "granite": (
        "GraniteConfig",
        {
            **_SHAPE,
            "embedding_multiplier": 5.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
    ),
    "cohere2": ("Cohere2Config", {**_SHAPE, "pad_token_id": 0, "sliding_window": 6, "logit_scale": 0.5}),
    "glm4": ("Glm4Config", {**_SHAPE, "head_dim": 16, "pad_token_id": 0}),
    "ernie4_5": ("Ernie4_5Config", {**_SHAPE, "head_dim": 16}),
    "exaone4": ("Exaone4Config", {**_SHAPE, "sliding_window": 6, "sliding_window_pattern": 2}),
    "phi": ("PhiConfig", _SHAPE),
    "starcoder2": ("Starcoder2Config", _SHAPE),
    "olmoe": ("OlmoeConfig", {**_SHAPE, **_EXPERTS, "intermediate_size": 32}),
    "mixtral": ("MixtralConfig", {**_SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {**_SHAPE, "head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_SHAPE,
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 6,
            "num_experts": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "top_k_experts": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "enable_moe_block": True,
            "moe_intermediate_size": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **_SHAPE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attention_chunk_size": 5,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "pad_token_id": 0,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_SHAPE,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_SHAPE, **_EXPERTS, "moe_intermediate_size": 32, "head_dim": 16}),
}


def tiny_config(family):
    """The configuration of a two-layer model of ``family``."""
    name, arguments = FAMILIES[family]
    return getattr(transformers, name)(**arguments)


@torch.no_grad()
def sharpened(model, factor, noise=0.0):
    """Enlarge the model's matrices, so that its choices differ from place to place; ``noise`` is added to vectors."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.mul_(factor)
        elif noise:
            parameter.add_(noise * torch.randn_like(parameter))
    return model


def tiny_model(family):
    """A random model of ``family`` with sharp choices."""
    torch.manual_seed(0)
    return sharpened(AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval(), 4)


@cache
def plain_logits(family, tokens):
    """The next-token logits [V] of the untouched model after ``tokens``: what every step must reproduce."""
    return all_plain_logits(_reference(family), tokens)[-1]


@torch.no_grad()
def all_plain_logits(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@cache
def _reference(family):
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    return model


LAYERS = 4  # of a ``new_model``


def new_model(family, dtype, **changes):
    """A fresh random model of ``family`` with weights large enough to matter, and norms that are not all ones."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config.num_hidden_layers = LAYERS
    for name, value in changes.items():
        setattr(config, name, list(value) if isinstance(value, tuple) else value)
    if getattr(config, "layer_types", None) and "layer_types" not in changes:
        config.layer_types = config.layer_types[:1] * LAYERS
    return sharpened(type(tiny_model(family))(config).eval(), 4, noise=0.25).to(dtype)
