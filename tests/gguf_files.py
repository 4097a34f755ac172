"""Small random models as GGUF files, written as llama.cpp's converter writes them."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tiny import sharpened, tiny_config
from tiny_pair import byte_tokenizer
from transformers import AutoModelForCausalLM

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
NAMES = {
    "llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "phi3": "PHI3", "gemma2": "GEMMA2", "gemma3": "GEMMA3",
    "mixtral": "LLAMA", "qwen3_moe": "QWEN3MOE", "smollm3": "SMOLLM3", "granite": "GRANITE", "olmo2": "OLMO2",
    "ernie4_5": "ERNIE4_5", "gpt_oss": "GPT_OSS",
}  # fmt: skip
# What files do not say, where llama.cpp knows no other kind.
_ALWAYS = {
    "qwen3_moe": {"norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4},
}
_PLAIN = ("mlp.gate.weight", "mlp.router.weight", ".bias")  # what the converter leaves in float32
_PERMUTED = ("llama", "smollm3", "granite")
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


def tiny_model(family, **changes):
    torch.manual_seed(0)
    config = tiny_config(family)
    for name, value in (_ALWAYS.get(family, {}) | changes).items():
        setattr(config, name, value)
    return sharpened(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), 4, noise=0.3)


def write_gguf(path, model, family="llama", kind=Kind.F32, *, tokens=True, facts=None, leave_out=(), more=None):
    """Write ``model``; matrices but routers in ``kind``, which may be asked by name."""
    config, kinds = model.config, kind if callable(kind) else lambda name: kind
    architecture = gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, NAMES[family])]
    writer = new_writer(path, architecture, _facts_of(config, architecture) | (facts or {}))
    if tokens:
        add_tokenizer(writer)
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, NAMES[family]), config.num_hidden_layers)
    for name, tensor in _with_experts_apart(model.state_dict(), config).items():
        stem, _, suffix = name.rpartition(".")
        theirs = f"{table.get_name(name)}.weight" if table.get_name(name) else f"{table.get_name(stem)}.{suffix}"
        if theirs in leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = np.ascontiguousarray(_as_written(name, tensor.numpy(), config, architecture))
        stored = kinds(theirs) if values.ndim >= 2 and not name.endswith(_PLAIN) else Kind.F32
        writer.add_tensor(theirs, values if stored == Kind.F32 else gguf.quantize(values, stored), raw_dtype=stored)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def new_writer(path, architecture, facts, prefix=""):
    """A file of the architecture with ``facts``, whose names begin with ``prefix``."""
    writer = gguf.GGUFWriter(path, architecture)
    adders = {
        str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        list: writer.add_array,
    }  # fmt: skip
    for name, value in facts.items():
        adders[type(value)](f"{prefix}{name}", value)
    return writer


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _facts_of(config, architecture):
    head_dim = getattr(config, "head_dim", None)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    facts = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": head_dim or config.hidden_size // config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "yarn":
        facts |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        facts["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if hasattr(config, "num_experts"):
        facts["expert_count"], facts["expert_used_count"] = config.num_experts, config.num_experts_per_tok
        facts["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    if head_dim:
        facts["attention.key_length"] = head_dim
    if hasattr(config, "sliding_window"):
        facts["attention.sliding_window"] = config.sliding_window or 0
    facts |= {theirs: float(getattr(config, ours)) for theirs, ours in _MULTIPLIERS.items() if hasattr(config, ours)}
    return {f"{architecture}.{name}": fact for name, fact in facts.items()}


def _as_written(name, values, config, architecture):
    """Gemma's norms with the one that its layers add; queries and keys of Llamas with the halves of heads together."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if architecture in _PERMUTED and ("q_proj" in name or "k_proj" in name):
        num_heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return values.reshape(num_heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return values


def _with_experts_apart(weights, config):
    """Gate and up of experts are one parameter in transformers, and two tensors for llama.cpp."""
    found = {}
    for name, tensor in weights.items():
        layer, _, part = name.partition(".experts.")
        if part and hasattr(config, "swiglu_limit"):  # gpt-oss's: [E, inputs, outputs], gate and up in turns
            suffix = "bias" if part.endswith("_bias") else "weight"
            tensor = tensor.transpose(1, 2) if suffix == "weight" else tensor
            kind = part.removesuffix("_bias")
            halves = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]} if kind == "gate_up_proj" else {"down": tensor}
            found |= {f"{layer}.experts.{half}_proj.{suffix}": values for half, values in halves.items()}
        elif part == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{layer}.experts.gate_proj.weight": gate, f"{layer}.experts.up_proj.weight": up}
        else:
            found[f"{name}.weight" if part else name] = tensor
    return found


def add_tokenizer(writer):
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges([f"{left} {right}" for left in "aeiou" for right in "nrst"])
    writer.add_eos_token_id(0)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 5)
    writer.add_chat_template(TEMPLATE)
