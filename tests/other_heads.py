"""Small heads of EAGLE-1 and Medusa with random weights under published names, and forwards of the formats."""

import json

import torch
from head_files import SIZES, Reference
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

HIDDEN, INNER = SIZES["hidden_size"], SIZES["intermediate_size"]


def first_config(vocab=64, **more):
    """As EAGLE-1 writes it: a plain Llama's, of one layer."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return {**sizes, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, **more}


def first_shapes(config, *, has_bias=True):
    """Names and shapes of an EAGLE-1 file: no first norm, no last norm, no head."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    keys = config.get("num_key_value_heads", heads) * (hidden // heads)
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "layers.0.self_attn.k_proj.weight": (keys, hidden),
        "layers.0.self_attn.v_proj.weight": (keys, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    if has_bias:
        shapes["fc.bias"] = (hidden,)
    if config.get("add_para_norm"):
        shapes |= {"embedding_layernorm.weight": (hidden,), "hidden_states_layernorm.weight": (hidden,)}
    return shapes


def medusa_shapes(hidden, vocab, num_heads=3, num_layers=1):
    """Names and shapes of ``medusa_lm_head.pt``: a list of sequences of residual blocks and an output layer."""
    shapes = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shapes[f"{head}.{layer}.linear.weight"] = hidden, hidden
            shapes[f"{head}.{layer}.linear.bias"] = (hidden,)
        shapes[f"{head}.{num_layers}.weight"] = vocab, hidden
    return shapes


def vllm_medusa_shapes(hidden, drafted, num_heads=3, num_layers=1, *, has_bias=False, is_shared=False):
    """The same as vLLM's files name them; the map of drafted tokens is the caller's."""
    shapes = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = hidden, hidden
            if has_bias:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
    outputs = 1 if is_shared else num_heads
    return shapes | {f"lm_heads.{head}.weight": (drafted, hidden) for head in range(outputs)}


def random_tensors(shapes, seed=0, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}


class StateTwin:
    """A format whose head predicts the state that it reads, as it is."""

    def feature(self, states):
        return states

    next_feature = feature


class FirstReference(StateTwin, Reference):
    """EAGLE-1's forward; ``output`` [V, H] is the target's head."""

    def __init__(self, config, tensors, embedding, output):
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        super().__init__({**config, "head_dim": hidden // heads}, tensors, embedding, spelling="layers.0.")
        self.output = output

    @torch.no_grad()
    def rows(self, tokens, features, positions, mask):
        config, embedded = self.config, self.embedding[tokens]
        if self.switches.get("add_para_norm"):
            embedded = self.norm(self.tensors["embedding_layernorm.weight"], embedded)
            features = self.norm(self.tensors["hidden_states_layernorm.weight"], features)
        z = torch.cat([embedded, features], dim=-1) @ self.tensors["fc.weight"].T + self.tensors.get("fc.bias", 0.0)
        shape = (1, len(tokens), -1, config.head_dim)
        q, k, v = (z @ self._of(f"self_attn.{name}_proj").T for name in ("q", "k", "v"))
        q, k, v = (each.view(shape).transpose(1, 2) for each in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(v, torch.as_tensor(positions)[None]))
        groups = config.num_attention_heads // config.num_key_value_heads
        scores = q @ repeat_kv(k, groups).transpose(-1, -2) / config.head_dim**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        h = z + (weights @ repeat_kv(v, groups)).transpose(1, 2).flatten(-2)[0] @ self._of("self_attn.o_proj").T
        h = h + self.mlp(self.norm(self._of("post_attention_layernorm"), h))
        return h, h @ self.output.T


@torch.no_grad()
def medusa_logits(tensors, states, head):
    """Of Medusa's own file: ``head`` on ``states`` [T, H], as a sequence of PyTorch's modules."""
    x = states
    layers = sorted({int(name.split(".")[1]) for name in tensors if name.startswith(f"{head}.") and "linear" in name})
    for layer in layers:
        linear = torch.nn.functional.linear(
            x, tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"]
        )
        x = x + torch.nn.SiLU()(linear)
    return x @ tensors[f"{head}.{1 + layers[-1]}.weight"].T


def write_medusa(folder, tensors, **config):
    """As Medusa writes it: a pickle of tensors and a configuration that counts the heads wrongly."""
    folder.mkdir(exist_ok=True)
    content = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/base", **config}
    (folder / "config.json").write_text(json.dumps(content))
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder
