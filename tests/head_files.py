"""Small EAGLE-3 heads with random weights under published names, and a forward of the format apart from ours."""

import json
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "num_hidden_layers": 1,
}  # fmt: skip


def published_tensors(config, *, spelling="midlayer.", seed=0):
    """Exact names and shapes: `fc`, the layer, `norm`, `lm_head`, and the vocabulary's tables."""
    layer = config.get("transformer_layer_config", config)
    hidden, vocab, drafted = layer["hidden_size"], layer["vocab_size"], config["draft_vocab_size"]
    target = config.get("target_hidden_size", hidden)
    shapes = {"fc.weight": (hidden, 3 * target)}
    shapes |= {f"{spelling}{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    shapes |= {
        **layer_shapes(spelling, layer, 2 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
    }
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * target,)
    if layer["model_type"] == "qwen3":
        shapes |= {f"{spelling}self_attn.{name}_norm.weight": (layer["head_dim"],) for name in ("q", "k")}
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(3)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    if drafted != vocab:
        tokens = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        tensors["d2t"] = tokens - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens, True)
    return tensors


def layer_shapes(prefix, layer, inputs):
    """Of the linears and the second norm of a decoder layer whose queries, keys and values are of ``inputs``."""
    hidden, inner, heads = layer["hidden_size"], layer["intermediate_size"], layer["num_attention_heads"]
    size = layer.get("head_dim", hidden // heads)
    queries, keys = heads * size, layer.get("num_key_value_heads", heads) * size
    shapes = {
        "self_attn.q_proj": (queries, inputs), "self_attn.k_proj": (keys, inputs), "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (hidden, queries), "post_attention_layernorm": (hidden,), "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def write_head(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def eagle_config(vocab=64, drafted=40, **more):
    """As EAGLE writes it: no word of rotary positions, and a context that means nothing."""
    return {
        **SIZES, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": vocab,
        "draft_vocab_size": drafted, "max_position_embeddings": 2048, **more,
    }  # fmt: skip


def speculators_config(vocab=64, drafted=40, layer=MappingProxyType({}), **more):
    return {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": drafted,
        "transformer_layer_config": {
            **SIZES, "model_type": "llama", "vocab_size": vocab, "rope_theta": 5000.0, **layer,
        },
        "norm_before_residual": False, "norm_before_fc": False, **more,
    }  # fmt: skip


class Reference:
    """The format's forward over a growing list of rows, with transformers' own layers; nothing of ours is used."""

    def __init__(self, config, tensors, embedding, *, spelling="midlayer."):
        layer = config.get("transformer_layer_config", config)
        theta = layer.get("rope_theta", 10000.0)
        self.config = LlamaConfig(
            **{name: layer[name] for name in SIZES}, rope_parameters={"rope_type": "default", "rope_theta": theta}
        )
        self.switches, self.tensors, self.embedding, self.spelling = config, tensors, embedding, spelling
        self.window = layer.get("sliding_window") if layer.get("layer_types") == ["sliding_attention"] else None
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.mlp = LlamaMLP(self.config)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(self.mlp, name).weight.data = self._of(f"mlp.{name}")

    def _of(self, name):
        return self.tensors[f"{self.spelling}{name}.weight"]

    def norm(self, weight, x):
        module = LlamaRMSNorm(weight.shape[0], self.config.rms_norm_eps)
        module.weight.data = weight
        return module(x)

    def feature(self, states):
        """Of [T, 3 * H]."""
        if self.switches.get("norm_before_fc"):
            states = self.norm(self.tensors["input_norm.weight"], states)
        if self.switches.get("fc_norm"):
            parts = states.chunk(3, dim=-1)
            states = torch.cat(
                [self.norm(self.tensors[f"fc_norm.{i}.weight"], part) for i, part in enumerate(parts)], -1
            )
        return states @ self.tensors["fc.weight"].T

    @torch.no_grad()
    def rows(self, tokens, features, positions, mask):
        """Outputs [T, H] and logits [T, Vd] of rows that attend where ``mask`` [T, T] says."""
        e = self.norm(self._of("input_layernorm"), self.embedding[tokens])
        n = self.norm(self._of("hidden_norm"), features)
        a = self._attention(torch.cat([e, n], dim=-1), positions, mask)
        residual = n if self.switches.get("norm_before_residual") else features
        h = residual + a
        h = h + self.mlp(self.norm(self._of("post_attention_layernorm"), h))
        return h, self.norm(self.tensors["norm.weight"], h) @ self.tensors["lm_head.weight"].T

    def _attention(self, x, positions, mask):
        config, shape = self.config, (1, len(x), -1, self.config.head_dim)
        q, k, v = ((x @ self._of(f"self_attn.{name}_proj").T).view(shape).transpose(1, 2) for name in ("q", "k", "v"))
        if f"{self.spelling}self_attn.q_norm.weight" in self.tensors:
            q, k = (self.norm(self._of(f"self_attn.{name}_norm"), each) for name, each in (("q", q), ("k", k)))
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(v, torch.as_tensor(positions)[None]))
        groups = config.num_attention_heads // config.num_key_value_heads
        if self.window:
            rows = torch.as_tensor(positions)
            mask = mask & (rows[:, None] - rows[None, :] < self.window)
        scores = q @ repeat_kv(k, groups).transpose(-1, -2) / config.head_dim**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return (weights @ repeat_kv(v, groups)).transpose(1, 2).flatten(-2)[0] @ self._of("self_attn.o_proj").T

    def next_feature(self, h):
        return self.norm(self.tensors["norm.weight"], h) if self.switches.get("norm_output") else h


def causal(query, key, value):
    """Causal attention of few rows, as a head calls it."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = (each.repeat_interleave(groups, dim=-3) for each in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(-3, -2)
