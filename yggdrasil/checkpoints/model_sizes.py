"""Sizes of a model as plain data, which can be cached so that later starts do not read its configuration.

Reading a configuration with transformers imports PyTorch's compiler, which takes longer than reading the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yggdrasil.checkpoints.recurrent import Recurrence, attending_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_UNLIMITED = 1 << 20  # positions, for models without a limit


def longest_text(config: "PretrainedConfig") -> int | None:
    """Return the number of positions up to which passes match transformers' code for the model; None without a limit.

    LongRoPE is limited to its original context: a longer text would change the rotation of all earlier positions.
    Llama 4 is limited to the positions at which its queries are not scaled, since transformers' code scales by row
    numbers and not by positions.
    """
    text = config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None)]
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        first = rope.get("original_max_position_embeddings")
        limits.append(first or getattr(text, "original_max_position_embeddings", None))
    if getattr(text, "attn_temperature_tuning", False) and getattr(text, "floor_scale", None):
        limits.append(int(text.floor_scale) - 1)
    return min((int(limit) for limit in limits if limit), default=None)


def layer_configs(text: Any) -> list[Any]:
    """Return the configuration of every layer of a text model; layers differ in models such as Gemma 4."""
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * int(text.num_hidden_layers)


def _key_heads(layer: Any) -> tuple[int, int]:
    """Return (number of key heads, head size) of a layer; the size is the larger one of keys and values."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    heads = 1 if getattr(layer, "multi_query", False) else heads
    if getattr(layer, "kv_lora_rank", None):  # latent attention expands the latent to keys and values per head
        return heads, max(layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim)
    return heads, getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


@dataclass(frozen=True)
class ModelSizes:
    """Sizes and end-of-text token of a model."""

    max_context: int  # positions, see ``longest_text``
    vocab_size: int  # rows of the embedding: at least the tokenizer's tokens, often padded
    hidden_size: int
    query_heads: int
    key_heads: tuple[tuple[int, int], ...]  # (key heads, head size) per layer; 0 heads for layers without attention
    eos: Any  # ``eos_token_id`` of the configuration: int, list or None
    recurrence: Recurrence | None = None  # for hybrid models

    @property
    def attention(self) -> tuple[int, int]:
        """(number of key/value heads, head size) of the last layer with attention, which draft heads adopt."""
        return next(pair for pair in reversed(self.key_heads) if pair[0])

    @property
    def remembering_layers(self) -> set[int]:
        """Return the indices of the layers that have a KV cache or a recurrent state."""
        attending = {number for number, (heads, _) in enumerate(self.key_heads) if heads}
        return attending if self.recurrence is None else attending | set(self.recurrence.layers)

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "ModelSizes":
        """Return the sizes of the model with this transformers configuration."""
        text = config.get_text_config()
        layers = layer_configs(text)
        return cls(
            longest_text(config) or _UNLIMITED, int(text.vocab_size), int(text.hidden_size),
            layers[0].num_attention_heads,
            tuple(
                _key_heads(layer) if attends else (0, _key_heads(layer)[1])
                for layer, attends in zip(layers, attending_layers(text), strict=True)
            ),
            getattr(text, "eos_token_id", None), Recurrence.of(text),
        )  # fmt: skip

    @classmethod
    def of_facts(
        cls, facts: Mapping[str, Any], rope: Mapping[str, Any], attends: Sequence[bool], recurrence: Recurrence | None
    ) -> "ModelSizes":
        """Return the sizes of a model from its configuration as a mapping, without transformers.

        Args:
            facts: the fields of config.json, with defaults for missing ones.
            rope: rotary parameters, transformers' ``rope_parameters``.
            attends: for each layer, whether it has attention.
            recurrence: sizes of the recurrent layers, or None without recurrent layers.
        """
        limits = [facts.get("max_position_embeddings")]
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
        longest = min((int(limit) for limit in limits if limit), default=_UNLIMITED)
        heads, size = int(facts["num_key_value_heads"]), int(facts["head_dim"])
        return cls(
            longest, int(facts["vocab_size"]), int(facts["hidden_size"]), int(facts["num_attention_heads"]),
            tuple((heads if each else 0, size) for each in attends), facts.get("eos_token_id"), recurrence,
        )  # fmt: skip

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "ModelSizes":
        """Return the sizes of a model from the JSON record that ``dataclasses.asdict`` made of them."""
        recurrence = Recurrence.from_record(record["recurrence"])
        return cls(**record | {"key_heads": tuple(map(tuple, record["key_heads"])), "recurrence": recurrence})
