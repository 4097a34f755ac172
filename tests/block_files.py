"""Small block heads (DFlash and its relatives) with random weights under published names, and their forward by itself.

The forward is written from the mathematics of z-lab/dflash's model.py: every layer's keys and values of the text are
projections of one normed feature a position, beside those of the block's own rows. DFlash2's convolutions and selector
are from there too, DSpark's Markov heads from deepseek-ai/DeepSpec's markov_head.py.
"""

import torch
from head_files import layer_shapes
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


def dflash2_config(vocab, block_size=5, **more):
    own = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 16}
    config = block_config(vocab, dflash={**own, "block_size": block_size}, architectures=["DFlash2DraftModel"], **more)
    return {name: value for name, value in config.items() if name != "block_size"}


def dspark_config(vocab, kind, block_size=4, layers=(0, 2, 4), **more):
    """As DeepSpec writes it: everything at the top."""
    config = block_config(vocab, block_size, architectures=["Qwen3DSparkModel"], markov_rank=6, markov_head_type=kind)
    del config["dflash_config"]
    more = {"enable_confidence_head": True, "confidence_head_with_markov": True, **more}
    return {**config, "target_layer_ids": list(layers), "mask_token_id": vocab - 1, **more}


def jetspec_config(vocab, block_size=5):
    return block_config(vocab, block_size, dflash={"causal_head": True})


def section_of(config):
    return {**config, **config.get("dflash_config", {})}


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
    hidden, size = layer["hidden_size"], layer["head_dim"]
    own = section_of(config)
    states = len(config.get("aux_hidden_state_layer_ids") or own["target_layer_ids"])
    shapes = {"fc.weight": (hidden, states * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for number in range(layer["num_hidden_layers"]):
        prefix = f"layers.{number}."
        shapes |= {f"{prefix}input_layernorm.weight": (hidden,), **layer_shapes(prefix, layer, hidden)}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (size,) for name in ("q", "k")}
        if taps := own.get("conv_kernel_size"):
            projected = 2 * taps * hidden // own["conv_group_size"]
            for where in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{number}.{where}.base_kernel"] = 2, taps, hidden
                shapes[f"layers.{number}.{where}.kernel_projection.weight"] = projected, hidden
    drafted = config.get("draft_vocab_size", layer["vocab_size"])
    if "draft_vocab_size" in config:
        shapes["lm_head.weight"] = drafted, hidden
    if rank := own.get("selector_rank"):
        shapes["candidate_selector.hidden_projection.weight"] = rank, hidden
        for name in ("predecessor", "successor"):
            shapes[f"candidate_selector.{name}_codebook"] = layer["vocab_size"], rank
    if rank := own.get("markov_rank"):
        shapes["markov_head.markov_w1.weight"] = layer["vocab_size"], rank
        shapes["markov_head.markov_w2.weight"] = drafted, rank
        sizes = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, hidden + 2 * rank)}
        if found := sizes.get(own["markov_head_type"]):
            shapes[f"markov_head.{found[0]}.weight"], shapes[f"markov_head.{found[0]}.bias"] = found[1:], found[1:2]
        if own.get("enable_confidence_head"):
            shapes["confidence_head.proj.weight"], shapes["confidence_head.proj.bias"] = (1, hidden + rank), (1,)
    return shapes


def block_tensors(config, seed=0):
    """Random weights; norms are near one, but the last: the target's output layer is sure of itself."""
    tensors = random_tensors(block_shapes(config), seed, scale=0.2)
    for name, tensor in tensors.items():
        if name.endswith(("norm.weight", "base_kernel")):
            tensor.add_(1.0)
    tensors["norm.weight"] *= 0.02
    return tensors


class BlockReference:
    """The forward of the format; ``output`` [V, H] is the target's output layer. ``views`` are (window, is causal)."""

    def __init__(self, config, tensors, embedding, output, views):
        self.tensors, self.embedding, self.views = tensors, embedding, views
        self.output = tensors.get("lm_head.weight", output)
        self.layer = config.get("transformer_layer_config", config)
        self.drafted = slice(None)  # target tokens that are drafted
        self.own = section_of(config)
        self.block_size, self.mask_token = self.own["block_size"], self.own["mask_token_id"]
        self.first_row = 0 if "markov_rank" in self.own else 1

    def context(self, states):
        """Keys and values [n, heads, size] of every layer, of the target's states [n, S]."""
        feature = self._norm(states @ self.tensors["fc.weight"].T, "hidden_norm")
        positions = torch.arange(len(states))
        return [self._keys(number, feature, positions) for number in range(len(self.views))]

    def logits(self, states, tokens, ends):
        """What the rows behind each of the ``ends`` [E] of the text say, [E, D, drafted]."""
        return self.outputs(states, tokens, ends) @ self.output.T

    def outputs(self, states, tokens, ends):
        """Normed outputs [E, D, H] of the rows that predict."""
        ends, size = torch.as_tensor(ends), self.block_size
        block = torch.full((len(ends), size), self.mask_token)
        block[:, 0] = torch.as_tensor(tokens)[ends]
        x, positions = self.embedding[block], ends[:, None] + torch.arange(size)
        context = self.context(states)
        for number, (window, is_causal) in enumerate(self.views):
            x = self._block_layer(number, x, positions, context[number], window, is_causal)
        return self._norm(x, "norm")[:, self.first_row :]

    def law_after(self, states, tokens, path):
        """Log-probabilities [drafted] after a text and ``path``, target tokens: with what the token before says."""
        outputs = self.outputs(states, tokens, [len(tokens) - 1])[0]
        logits, before = outputs @ self.output.T, [tokens[-1], *path]
        law, state = logits[len(path)], torch.zeros(self.own.get("markov_rank", 0))
        if "selector_rank" in self.own:
            first = {name: self.tensors[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")}
            projected = self.tensors["candidate_selector.hidden_projection.weight"] @ outputs[len(path)]
            bias = first["successor"][self.drafted] @ (first["predecessor"][before[-1]] * projected)
            kept = law.topk(min(self.own["selector_top_k"], len(law))).indices
            return torch.full_like(law, float("-inf")).index_copy(0, kept, (law + bias)[kept]).log_softmax(-1)
        for depth, token in enumerate(before if "markov_rank" in self.own else []):
            bias, state = self._markov(token, outputs[depth], state)
        return (law + bias if "markov_rank" in self.own else law).log_softmax(-1)

    def _markov(self, token, output, state):
        tensors = {name.removeprefix("markov_head."): tensor for name, tensor in self.tensors.items()}
        known, kind = tensors["markov_w1.weight"][token], self.own["markov_head_type"]
        following = tensors["markov_w2.weight"]
        following = following if "draft_vocab_size" in self.own else following[self.drafted]
        if kind == "vanilla":
            return following @ known, state
        if kind == "gated":
            gate = tensors["gate_proj.weight"] @ torch.cat([output, known]) + tensors["gate_proj.bias"]
            return following @ (gate.sigmoid() * known), state
        joint = tensors["joint_proj.weight"] @ torch.cat([state, known, output]) + tensors["joint_proj.bias"]
        gate, new, out = joint.chunk(3)
        return following @ out.tanh(), gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()

    def _convolved(self, number, where, side, x, normed):
        """Sum over taps: fixed weights and those of the layer's normed input, of the row and of the one before it."""
        if "conv_kernel_size" not in self.own:
            return x
        name, taps, size = f"layers.{number}.{where}.", self.own["conv_kernel_size"], self.own["conv_group_size"]
        said = (normed @ self.tensors[f"{name}kernel_projection.weight"].T).view(*normed.shape[:-1], 2, taps, -1)
        total = torch.zeros_like(x)
        for tap in range(taps):
            weight = self.tensors[f"{name}base_kernel"][side, tap] + said[..., side, tap, :].repeat_interleave(size, -1)
            moved = torch.cat([torch.zeros_like(x[:, :tap]), x[:, : x.shape[1] - tap]], dim=1)
            total = total + weight * moved
        return total

    def _block_layer(self, number, x, positions, context, window, is_causal):
        name = f"layers.{number}."
        said = self._norm(x, f"{name}input_layernorm")
        normed = self._convolved(number, "attention_conv", 0, said, said)
        query = self._turned(self._norm(self._heads(normed, number, "q"), f"{name}self_attn.q_norm"), positions)
        keys, values = self._keys(number, normed, positions)
        old_keys, old_values = (each.expand(len(x), *each.shape) for each in context)
        keys, values = torch.cat([old_keys, keys], dim=1), torch.cat([old_values, values], dim=1)
        groups = query.shape[2] // keys.shape[2]
        scores = torch.einsum("ebhd,eshd->ehbs", query, keys.repeat_interleave(groups, 2)) / query.shape[-1] ** 0.5
        sees = self._sees(positions, len(context[0]), window, is_causal)
        weights = scores.masked_fill(~sees[:, None], float("-inf")).softmax(-1)
        mixed = torch.einsum("ehbs,eshd->ebhd", weights, values.repeat_interleave(groups, 2)).flatten(2)
        mixed = mixed @ self.tensors[f"{name}self_attn.o_proj.weight"].T
        h = x + self._convolved(number, "attention_conv", 1, mixed, said)
        said = self._norm(h, f"{name}post_attention_layernorm")
        normed = self._convolved(number, "mlp_conv", 0, said, said)
        gate, up = (normed @ self.tensors[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        output = (functional.silu(gate) * up) @ self.tensors[f"{name}mlp.down_proj.weight"].T
        return h + self._convolved(number, "mlp_conv", 1, output, said)

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


def learned(reference, states, tokens, choices, ends, steps=40):
    """Have the reference's tensors say ``choices`` [E, D] behind the ``ends`` of a text, mostly."""
    tensors = [tensor.requires_grad_() for tensor in reference.tensors.values() if tensor.is_floating_point()]
    optimizer = torch.optim.Adam(tensors, lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = reference.logits(states, tokens, ends)
        functional.cross_entropy(logits.flatten(0, 1), choices.flatten(), ignore_index=-1).backward()
        optimizer.step()
    for tensor in tensors:
        tensor.requires_grad_(False)
