"""Expected weight names and shapes of natively supported models."""

from yggdrasil.runtime.native_steps.families import FAMILIES, Config, Description, with_defaults

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_NORMS = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "behind": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip


def is_tied(config: Config) -> bool:
    """Return whether the embedding is the LM head if the checkpoint has no LM head."""
    full = with_defaults(config)
    return bool(full and full["tie_word_embeddings"])


def weight_shapes(config: Config, described: Description) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights by name, in the order of the layers; the LM head's only if it is not tied."""
    family = FAMILIES[config["model_type"]]
    hidden, inner, size = described.hidden_size, described.inner_size, described.head_size
    query, key = described.query_heads * size, described.key_heads * size
    linears = {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    if family.is_joined:
        joined = {"self_attn.qkv_proj": (query + 2 * key, hidden), "mlp.gate_up_proj": (2 * inner, hidden)}
        linears = joined | {name: linears[name] for name in ("self_attn.o_proj", "mlp.down_proj")}
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    layer |= {f"{name}.bias": linears[name][:1] for name in family.biases(config)}
    layer |= {f"{name}.weight": (hidden,) for name in _NORMS[family.norms]}
    if family.head_norms != "none":
        sizes = (size, size) if family.head_norms == "each" else (query, key)
        layer |= dict(zip(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), ((n,) for n in sizes), strict=True))
    table = (described.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table}
    for number in range(len(described.layers)):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes | {LAST_NORM: (hidden,)} | ({} if is_tied(config) else {HEAD: table})
