"""Small block heads (DFlash) with random weights under published names, and a forward of the format apart from ours.

The forward is written from the mathematics of z-lab/dflash's model.py: every layer's keys and values of the text are
projections of one normed feature a position, beside those of the block's own rows.
"""

import torch
from other_heads import random_tensors
from torch.nn import functional

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "num_hidden_layers": 2, "rope_theta": 10000.0, "model_type": "qwen3",
}  # fmt: skip
# z-lab/Qwen3-4B-DFlash-b16, by what its readers say of it (speculators' converter, lmdeploy, vLLM).
QWEN3_4B = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "model_type": "qwen3",
    "block_size": 16, "num_target_layers": 36, "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "attention_bias": False,
    "layer_types": ["full_attention"] * 5, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 5,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-06,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


def block_config(vocab, block_size=16, layers=(0, 2, 4), target_layers=6, dflash=None, **more):
    """As z-lab writes it: layers by their outputs."""
    own = {"mask_token_id": vocab - 1, "target_layer_ids": list(layers), **(dflash or {})}
    return {
        **SIZES, "architectures": ["DFlashDraftModel"], "vocab_size": vocab, "block_size": block_size,
        "num_target_layers": target_layers, "dflash_config": own, "max_position_embeddings": 8, **more,
    }  # fmt: skip


def speculators_block_config(vocab, drafted, block_size=4, layers=(1, 3, 5), layer=None, **more):
    """As speculators writes it: layers by their inputs, a vocabulary and an output layer of its own."""
    return {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": block_size,
        "aux_hidden_state_layer_ids": list(layers), "mask_token_id": vocab - 1, "draft_vocab_size": drafted,
        "transformer_layer_config": {**SIZES, "vocab_size": vocab, **(layer or {})}, **more,
    }  # fmt: skip


def block_shapes(config):
    """Names and shapes of a block head's file: no embedding, an output layer only for a vocabulary of its own."""
    layer = config.get("transformer_layer_config", config)
    hidden, inner, size = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    queries, keys = layer["num_attention_heads"] * size, layer["num_key_value_heads"] * size
    states = len(config.get("aux_hidden_state_layer_ids") or config["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (hidden, states * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for number in range(layer["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries),
            "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
            "self_attn.q_norm": (size,), "self_attn.k_norm": (size,), "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in of_layer.items()}
    if "draft_vocab_size" in config:
        shapes["lm_head.weight"] = config["draft_vocab_size"], hidden
    return shapes


def block_tensors(config, seed=0):
    """Random weights; norms are near one, but the last: the target's output layer is sure of itself."""
    tensors = random_tensors(block_shapes(config), seed, scale=0.2)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.add_(1.0)
    tensors["norm.weight"] *= 0.02
    return tensors


class BlockReference:
    """The forward of the format; ``output`` [V, H] is the target's output layer. ``views`` are (window, is causal)."""

    def __init__(self, config, tensors, embedding, output, views):
        self.tensors, self.embedding, self.views = tensors, embedding, views
        self.output = tensors.get("lm_head.weight", output)
        self.layer = config.get("transformer_layer_config", config)
        self.block_size = config["block_size"]
        self.mask_token = config.get("mask_token_id", config.get("dflash_config", {}).get("mask_token_id"))

    def context(self, states):
        """Keys and values [n, heads, size] of every layer, of the target's states [n, S]."""
        feature = self._norm(states @ self.tensors["fc.weight"].T, "hidden_norm")
        positions = torch.arange(len(states))
        return [self._keys(number, feature, positions) for number in range(len(self.views))]

    def logits(self, states, tokens, ends):
        """What the masks behind each of the ``ends`` [E] of the text say, [E, B - 1, drafted]."""
        ends, size = torch.as_tensor(ends), self.block_size
        block = torch.full((len(ends), size), self.mask_token)
        block[:, 0] = torch.as_tensor(tokens)[ends]
        x, positions = self.embedding[block], ends[:, None] + torch.arange(size)
        context = self.context(states)
        for number, (window, is_causal) in enumerate(self.views):
            x = self._block_layer(number, x, positions, context[number], window, is_causal)
        return self._norm(x, "norm")[:, 1:] @ self.output.T

    def _block_layer(self, number, x, positions, context, window, is_causal):
        name = f"layers.{number}."
        normed = self._norm(x, f"{name}input_layernorm")
        query = self._turned(self._norm(self._heads(normed, number, "q"), f"{name}self_attn.q_norm"), positions)
        keys, values = self._keys(number, normed, positions)
        old_keys, old_values = (each.expand(len(x), *each.shape) for each in context)
        keys, values = torch.cat([old_keys, keys], dim=1), torch.cat([old_values, values], dim=1)
        groups = query.shape[2] // keys.shape[2]
        scores = torch.einsum("ebhd,eshd->ehbs", query, keys.repeat_interleave(groups, 2)) / query.shape[-1] ** 0.5
        sees = self._sees(positions, len(context[0]), window, is_causal)
        weights = scores.masked_fill(~sees[:, None], float("-inf")).softmax(-1)
        mixed = torch.einsum("ehbs,eshd->ebhd", weights, values.repeat_interleave(groups, 2)).flatten(2)
        h = x + mixed @ self.tensors[f"{name}self_attn.o_proj.weight"].T
        normed = self._norm(h, f"{name}post_attention_layernorm")
        gate, up = (normed @ self.tensors[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return h + (functional.silu(gate) * up) @ self.tensors[f"{name}mlp.down_proj.weight"].T

    @staticmethod
    def _sees(positions, length, window, is_causal):
        """Which of ``length`` rows of the text and of its own each row of a block sees, [E, B, length + B]."""
        size, first = positions.shape[1], positions[:, :1, None]
        old, own = torch.arange(length), torch.arange(size)
        rows = positions[:, :, None]
        text = (old < first).expand(-1, size, -1)
        if window:
            text = text & ((rows if is_causal else first) - old < window)
        block = own[:, None] >= own if is_causal else torch.ones(size, size, dtype=torch.bool)
        if window and is_causal:
            block = block & (own[:, None] - own < window)
        return torch.cat([text, block.expand(len(positions), -1, -1)], dim=-1)

    def _keys(self, number, rows, positions):
        keys = self._norm(self._heads(rows, number, "k"), f"layers.{number}.self_attn.k_norm")
        return self._turned(keys, positions), self._heads(rows, number, "v")

    def _heads(self, rows, number, which):
        weight = self.tensors[f"layers.{number}.self_attn.{which}_proj.weight"]
        return (rows @ weight.T).unflatten(-1, (-1, self.layer["head_dim"]))

    def _norm(self, x, name):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]

    def _turned(self, x, positions):
        """Rotary embedding of x [.., W, heads, size] at positions [.., W]: complex numbers of two halves."""
        size = x.shape[-1]
        angles = positions[..., None, None] * self.layer["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        real, imaginary = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat(
            [real * angles.cos() - imaginary * angles.sin(), imaginary * angles.cos() + real * angles.sin()], dim=-1
        )


def learned(reference, states, tokens, choices, ends, steps=120):
    """Have the reference's tensors say ``choices`` [E, B - 1] behind the ``ends`` of a text, mostly."""
    tensors = [tensor.requires_grad_() for tensor in reference.tensors.values() if tensor.is_floating_point()]
    optimizer = torch.optim.Adam(tensors, lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = reference.logits(states, tokens, ends)
        functional.cross_entropy(logits.flatten(0, 1), choices.flatten(), ignore_index=-1).backward()
        optimizer.step()
    for tensor in tensors:
        tensor.requires_grad_(False)
