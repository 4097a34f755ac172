"""Small heads of EAGLE-1 and Medusa with random weights under published names, and forwards of the formats."""

import json

import torch
from head_files import SIZES, Reference, layer_shapes

HIDDEN, INNER = SIZES["hidden_size"], SIZES["intermediate_size"]


def first_config(vocab=64, **more):
    """As EAGLE-1 writes it: a plain Llama's, of one layer."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return {**sizes, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, **more}


def first_shapes(config, *, has_bias=True):
    """Names and shapes of an EAGLE-1 file: no first norm, no last norm, no head."""
    hidden = config["hidden_size"]
    shapes = {"fc.weight": (hidden, 2 * hidden), **layer_shapes("layers.0.", config, hidden)}
    norm = "layers.0.post_attention_layernorm.weight"
    shapes[norm] = shapes.pop(norm)  # last: numbers are drawn in this order, and with these the head drafts well
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
        embedded = self.embedding[tokens]
        if self.switches.get("add_para_norm"):
            embedded = self.norm(self.tensors["embedding_layernorm.weight"], embedded)
            features = self.norm(self.tensors["hidden_states_layernorm.weight"], features)
        z = torch.cat([embedded, features], dim=-1) @ self.tensors["fc.weight"].T + self.tensors.get("fc.bias", 0.0)
        h = z + self._attention(z, positions, mask)
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
