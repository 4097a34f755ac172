"""What decoding asks of a model's configuration, as plain data: it can be kept, so that a later start reads no more.

Reading a configuration with transformers imports PyTorch's compiler, which takes longer than reading the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yggdrasil.checkpoints.recurrent import Recurrence, attending_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_UNLIMITED = 1 << 20  # positions, where a model names no limit


def longest_text(config: "PretrainedConfig") -> int | None:
    """Positions that a traced model computes as its own code does; None where there is no limit.

    Of LongRoPE those of its first training: behind them all earlier rows would have to turn otherwise. Of Llama 4 those
    before its queries are scaled, by numbers that its code takes from rows and not from positions.
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
    """The configuration of every layer; they differ where a model says so (Gemma 4)."""
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * int(text.num_hidden_layers)


def _key_heads(layer: Any) -> tuple[int, int]:
    """Key heads of a layer by its configuration, and the greater of the sizes that its keys and values have."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    heads = 1 if getattr(layer, "multi_query", False) else heads
    if getattr(layer, "kv_lora_rank", None):  # latent attention: keys and values of every head are made of a latent
        return heads, max(layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim)
    return heads, getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


@dataclass(frozen=True)
class Outline:
    """A model's sizes, and where it says its text ends."""

    max_context: int  # positions the model was built for
    vocab_size: int  # rows of the embedding: at least the tokens of the tokenizer, often padded
    hidden_size: int
    query_heads: int
    key_heads: tuple[tuple[int, int], ...]  # (key heads, head size) of every layer; no heads where it does not attend
    eos: Any  # as the configuration has it
    recurrence: Recurrence | None = None  # of a hybrid model

    @property
    def attention(self) -> tuple[int, int]:
        """(key heads, head size) of the last layer that attends."""
        return next(pair for pair in reversed(self.key_heads) if pair[0])

    @property
    def remembering_layers(self) -> set[int]:
        """Numbers of the layers that attend or recur."""
        attending = {number for number, (heads, _) in enumerate(self.key_heads) if heads}
        return attending if self.recurrence is None else attending | set(self.recurrence.layers)

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "Outline":
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
    def of_facts(cls, facts: Mapping[str, Any], rope: Mapping[str, Any]) -> "Outline":
        """Of a decoder's configuration as a mapping in which nothing is left out, and its rotary parameters."""
        limits = [facts.get("max_position_embeddings")]
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
        longest = min((int(limit) for limit in limits if limit), default=_UNLIMITED)
        heads = int(facts["num_key_value_heads"]), int(facts["head_dim"])
        return cls(
            longest, int(facts["vocab_size"]), int(facts["hidden_size"]), int(facts["num_attention_heads"]),
            (heads,) * int(facts["num_hidden_layers"]), facts.get("eos_token_id"),
        )  # fmt: skip

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Outline":
        """What ``dataclasses.asdict`` and JSON made of one."""
        recurrence = Recurrence.from_record(record["recurrence"])
        return cls(**record | {"key_heads": tuple(map(tuple, record["key_heads"])), "recurrence": recurrence})
