"""Expected weight names and shapes of natively supported models."""

from collections.abc import Mapping

from yggdrasil.runtime.native_steps.description import Description
from yggdrasil.runtime.native_steps.families import CONVOLUTION, FAMILIES, Config, Family, with_defaults

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_NORMS = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "behind": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip


def is_tied(config: Config) -> bool:
    """Return whether the model uses its embedding as LM head if its checkpoint has no LM head.

    The result is False for families that native steps do not cover.
    """
    full = with_defaults(config)
    return bool(full and full["tie_word_embeddings"])


def weight_shapes(config: Config, described: Description) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights of a model that native steps cover, by their names in checkpoints.

    The order is: embedding, layers, last norm, LM head. An LM head tied to the embedding is not included.

    Args:
        config: config.json as a mapping.
        described: the same model's sizes and layer properties, as ``describe(config)`` returns them.
    """
    family, hidden = FAMILIES[config["model_type"]], described.hidden_size
    linears = {kind: _linears(family, described, kind) for kind in {shape.kind for shape in described.layers}}
    table = (described.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table}
    for number, shape in enumerate(described.layers):
        layer = {f"{name}.weight": size for name, size in linears[shape.kind].items()}
        has_bias = linears[shape.kind].keys() & set(family.biases(config))
        layer |= {f"{name}.bias": linears[shape.kind][name][:1] for name in sorted(has_bias)}
        layer |= {f"{name}.weight": (hidden,) for name in _NORMS[family.norms]}
        layer |= {} if shape.kind == CONVOLUTION else _head_norms(family, described)
        shapes |= {f"model.layers.{number}.{name}": size for name, size in layer.items()}
    shapes |= {LAST_NORM: (hidden,)} | ({} if is_tied(config) else {HEAD: table})
    return {checkpoint_name(name, family.names): size for name, size in shapes.items()}


def _linears(family: Family, of: Description, kind: str) -> dict[str, tuple[int, ...]]:
    """Return the weight shapes of the linear layers, and of the convolution, of a layer of ``kind``, by name."""
    hidden, inner = of.hidden_size, of.inner_size
    query, key = of.query_heads * of.head_size, of.key_heads * of.head_size
    mlp = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    if kind == CONVOLUTION:
        assert of.recurrence is not None, "a layer is a convolution"
        conv = (hidden, 1, of.recurrence.conv_kernel)
        return {"conv.in_proj": (3 * hidden, hidden), "conv.conv": conv, "conv.out_proj": (hidden, hidden), **mlp}
    if family.is_joined:
        return {
            "self_attn.qkv_proj": (query + 2 * key, hidden), "self_attn.o_proj": (hidden, query),
            "mlp.gate_up_proj": (2 * inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
    return {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query), **mlp,
    }  # fmt: skip


def _head_norms(family: Family, of: Description) -> dict[str, tuple[int, ...]]:
    """Return the weight shapes of the norms of queries and keys, by name; empty without these norms."""
    if family.head_norms == "none":
        return {}
    size = of.head_size
    sizes = (size, size) if family.head_norms == "each" else (of.query_heads * size, of.key_heads * size)
    return dict(zip(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), ((n,) for n in sizes), strict=True))


def checkpoint_name(name: str, names: Mapping[str, str]) -> str:
    """Return the name in checkpoints of the weight that Llama calls ``name``.

    Args:
        names: map from parts of Llama's names to those of the model's family, as ``names_of`` returns it.
    """
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name
