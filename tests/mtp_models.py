"""Small targets that bring a module for multi-token prediction, under published names, and forwards of the formats."""

import json
from typing import NamedTuple

import torch
from other_heads import StateTwin
from safetensors.torch import load_file, save_file
from tiny import sharpened
from tiny_pair import VOCAB_SIZE
from torch.nn import functional
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

HIDDEN, INNER, HEADS, KEY_HEADS, SIZE, LAYERS, EXPERTS, EXPERT_INNER = 32, 48, 4, 2, 8, 2, 4, 16


class Sizes(NamedTuple):
    """Of a target and its module."""

    hidden: int = HIDDEN
    inner: int = INNER
    heads: int = HEADS
    key_heads: int = KEY_HEADS
    size: int = SIZE
    layers: int = LAYERS
    experts: int = EXPERTS
    expert_inner: int = EXPERT_INNER
    vocab: int = VOCAB_SIZE


_SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "rms_norm_eps": 1e-5,
}  # fmt: skip
_DELTA = {
    "head_dim": SIZE, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
_EXPERTS = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_INNER,
    "shared_expert_intermediate_size": EXPERT_INNER,
}  # fmt: skip
_MODELS = {
    "mimo": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, rope_theta=5000.0)),
    "glm4_moe": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **_SIZES, head_dim=SIZE, n_routed_experts=EXPERTS, num_experts_per_tok=2, use_qk_norm=True,
            moe_intermediate_size=EXPERT_INNER, attention_bias=True, routed_scaling_factor=1.5,
        )
    ),
    "ernie4_5_moe": lambda: Ernie4_5_MoeForCausalLM(
        Ernie4_5_MoeConfig(
            **_SIZES, moe_num_experts=EXPERTS, moe_k=2, moe_intermediate_size=EXPERT_INNER, moe_num_shared_experts=1,
            tie_word_embeddings=True,
        )
    ),
    "qwen3_5_text": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_SIZES, **_DELTA)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**_SIZES, **_DELTA, **_EXPERTS)),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**_SIZES, **_DELTA, **_EXPERTS)),
}  # fmt: skip
FAMILIES = tuple(_MODELS)
QWEN_MOE = ("qwen3_next", "qwen3_5_moe_text")
QWEN = ("qwen3_5_text", *QWEN_MOE)
PREFIXES = {
    "mimo": "model.mtp_layers.0.", "glm4_moe": "model.layers.{layers}.", "ernie4_5_moe": "model.mtp_block.0.",
    **dict.fromkeys(QWEN, "mtp.layers.0."),
}  # fmt: skip
PROJECTIONS = {
    "mimo": "model.mtp_layers.0.input_proj.weight",
    "glm4_moe": f"model.layers.{LAYERS}.eh_proj.weight",
    "ernie4_5_moe": "model.mtp_linear_proj.0.weight",
    **dict.fromkeys(QWEN, "mtp.fc.weight"),
}


def tiny_target(family):
    """A random model of the family whose choices differ from place to place."""
    torch.manual_seed(0)
    model = sharpened(_MODELS[family]().eval(), 3)
    model.get_output_embeddings().weight.data.mul_(30)
    return model


def module_shapes(family, sizes=Sizes()):  # noqa: B008
    """Names and shapes of the module's tensors in the target's files."""
    hidden, rows = sizes.hidden, {"q": sizes.heads, "k": sizes.key_heads, "v": sizes.key_heads}
    prefix = PREFIXES[family].format(layers=sizes.layers)
    shapes = {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    for name, heads in rows.items():
        is_gated = family in QWEN and name == "q"
        shapes[f"{prefix}self_attn.{name}_proj.weight"] = heads * sizes.size * (1 + is_gated), hidden
        if family in ("mimo", "glm4_moe"):
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (heads * sizes.size,)
    shapes[f"{prefix}self_attn.o_proj.weight"] = hidden, sizes.heads * sizes.size
    parts = {"mlp.": sizes.inner}
    if family in ("glm4_moe", *QWEN):
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (sizes.size,) for name in ("q", "k")}
    if family in ("glm4_moe", *QWEN_MOE):
        parts = {"mlp.shared_experts." if family == "glm4_moe" else "mlp.shared_expert.": sizes.expert_inner}
        parts |= {f"mlp.experts.{number}.": sizes.expert_inner for number in range(sizes.experts)}
        shapes[f"{prefix}mlp.gate.weight"] = sizes.experts, hidden
    if family in QWEN_MOE:
        shapes[f"{prefix}mlp.shared_expert_gate.weight"] = 1, hidden
    if family == "glm4_moe":
        shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (sizes.experts,)
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{prefix}{name}.weight": (sizes.vocab, hidden) for name in ("embed_tokens", "shared_head.head")}
    else:
        norms = {
            "mimo": [f"{prefix}{name}_layernorm" for name in ("token", "hidden", "final")],
            "ernie4_5_moe": ["model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"],
            **{key: ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"] for key in QWEN},
        }
        shapes |= {f"{name}.weight": (hidden,) for name in norms[family]}
    for part, inner in parts.items():
        shapes |= {f"{prefix}{part}{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}{part}down_proj.weight"] = hidden, inner
    projection = PROJECTIONS[family].replace(f".{LAYERS}.", f".{sizes.layers}.")
    return shapes | {projection: (hidden, 2 * hidden)}


def random_module(family, scale=0.05):
    """Tensors of a module; what norms multiply by is near one, to which Qwen's files do not count the one."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) * scale for name, shape in module_shapes(family).items()}
    one = 0.0 if family in QWEN else 1.0
    return {name: tensor + one if "norm" in name else tensor for name, tensor in tensors.items()}


def write_target(folder, family, model, module):
    """A checkpoint as the family publishes it, with the module's tensors among its own."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": family, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors") | {name: each.contiguous() for name, each in module.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class Reference(StateTwin):
    """The formats' forwards by tensors alone; nothing of ours or of transformers' layers is used."""

    def __init__(self, family, module, model):
        self.family, self.tensors = family, module
        self.embedding, self.output = (
            each.weight.detach() for each in (model.get_input_embeddings(), model.get_output_embeddings())
        )
        self.last_norm = model.model.norm.weight.detach()
        self.theta = {"glm4_moe": 10000.0, "ernie4_5_moe": 500000.0}.get(family, 5000.0)
        self.prefix = next(name for name in module if "input_layernorm" in name).removesuffix("input_layernorm.weight")

    def _of(self, name):
        return self._named(f"{self.prefix}{name}")

    def _named(self, name):
        return self.tensors[name] + (1.0 if "norm" in name and self.family in QWEN else 0.0)

    def _linear(self, name, x):
        bias = self.tensors.get(f"{self.prefix}{name}.bias")
        return functional.linear(x, self._of(f"{name}.weight"), bias)

    def fused(self, tokens, features):
        """What the layer reads, from the token's embedding and the state of the position before."""
        embedded = self.embedding[tokens]
        if self.family == "mimo":
            parts = (
                norm(features, self._of("hidden_layernorm.weight")),
                norm(embedded, self._of("token_layernorm.weight")),
            )
        elif self.family == "glm4_moe":
            parts = norm(embedded, self._of("enorm.weight")), norm(features, self._of("hnorm.weight"))
        else:
            names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
            names = names if self.family in QWEN else ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0")
            parts = norm(embedded, self._named(f"{names[0]}.weight")), norm(features, self._named(f"{names[1]}.weight"))
        return torch.cat(parts, dim=-1)

    @torch.no_grad()
    def rows(self, tokens, features, positions, mask):
        """Drafted states [T, H] and logits [T, V] of rows that attend where ``mask`` [T, T] says."""
        x = self.fused(tokens, features) @ self.tensors[PROJECTIONS[self.family]].T
        x = x + self._attention(norm(x, self._of("input_layernorm.weight")), positions, mask)
        h = norm(x, self._of("post_attention_layernorm.weight"))
        x = x + (self._experts(h) if f"{self.prefix}mlp.gate.weight" in self.tensors else self._feed_forward("mlp.", h))
        last = {"mimo": "final_layernorm.weight", "glm4_moe": "shared_head.norm.weight"}.get(self.family)
        if self.family in QWEN:
            scale = self._named("mtp.norm.weight")
        else:
            scale = self.last_norm if last is None else self._of(last)
        state = norm(x, scale)
        return state, state @ self.output.T

    def _attention(self, x, positions, mask):
        q, k, v = (
            self._linear(f"self_attn.{name}_proj", x).unflatten(-1, (heads, -1)).transpose(0, 1)
            for name, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS))
        )
        gate = q[..., SIZE:].sigmoid() if self.family in QWEN else 1.0
        q = q[..., :SIZE]
        if self.family in ("glm4_moe", *QWEN):
            q, k = norm(q, self._of("self_attn.q_norm.weight")), norm(k, self._of("self_attn.k_norm.weight"))
        q, k = self._turned(q, positions), self._turned(k, positions)
        k, v = (each.repeat_interleave(HEADS // KEY_HEADS, dim=0) for each in (k, v))
        weights = (q @ k.transpose(-1, -2) / SIZE**0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        return self._linear("self_attn.o_proj", (weights @ v * gate).transpose(0, 1).flatten(-2))

    def _turned(self, x, positions):
        """Rotary positions: halves for MiMo, of half the channels for GLM and Qwen, neighbouring pairs for ERNIE."""
        size = SIZE // 2 if self.family in ("glm4_moe", *QWEN) else SIZE
        angles = positions[:, None] * self.theta ** -(torch.arange(0, size, 2) / size)
        cos, sin, rest = angles.cos(), angles.sin(), x[..., size:]
        if self.family == "ernie4_5_moe":
            first, second = x[..., 0::2], x[..., 1::2]
            return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        first, second = x[..., : size // 2], x[..., size // 2 : size]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def _feed_forward(self, part, x):
        gate, up = self._linear(f"{part}gate_proj", x), self._linear(f"{part}up_proj", x)
        return self._linear(f"{part}down_proj", functional.silu(gate) * up)

    def _experts(self, x):
        """Two of four by sigmoid and a bias that only chooses; shares of the two, and the expert of all.

        Qwen's mixtures choose by a softmax, and a gate of its own says how much of the expert of all is taken.
        """
        if self.family in QWEN_MOE:
            shares = (x @ self._of("mlp.gate.weight").T).softmax(-1)
            shared = (x @ self._of("mlp.shared_expert_gate.weight").T).sigmoid()
            output = shared * self._feed_forward("mlp.shared_expert.", x)
            for row, share in enumerate(shares):
                for expert in share.topk(2).indices.tolist():
                    weight = share[expert] / share.topk(2).values.sum()
                    output[row] += weight * self._feed_forward(f"mlp.experts.{expert}.", x[row])
            return output
        scores = (x @ self._of("mlp.gate.weight").T).sigmoid()
        output = self._feed_forward("mlp.shared_experts.", x)
        for row, score in enumerate(scores):
            chosen = (score + self._of("mlp.gate.e_score_correction_bias")).topk(2).indices.tolist()
            for expert in chosen:
                share = 1.5 * score[expert] / score[chosen].sum()
                output[row] += share * self._feed_forward(f"mlp.experts.{expert}.", x[row])
        return output


def norm(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
