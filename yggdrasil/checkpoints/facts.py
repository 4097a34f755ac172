"""Loads a model's configuration and tokenizer, and refuses unsupported models before their weights are read."""

import filecmp
from pathlib import Path
from typing import TYPE_CHECKING

from yggdrasil.checkpoints.families import register_family
from yggdrasil.checkpoints.kept_tokenizer import open_tokenizer
from yggdrasil.checkpoints.model_sizes import layer_configs
from yggdrasil.checkpoints.recurrent import Recurrence, layer_types
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.errors import YggdrasilError, one_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MOST_POSITIONS = 2**31 - 1
MOST_LAYERS = 1024  # far more than any model has; bounds the memory that a damaged configuration can allocate
_RECURRENT_LAYERS = {"linear_attention", "mamba", "recurrent", "conv", "hybrid", "rwkv"}
_POSITIONS = (None, "absolute", "rotary", "rope", "nope")  # supported values; Granite's hybrids have no positions
_NO_TREE = (
    "no tree can be verified in one pass; served are those of LFM2 (short convolutions), Qwen3.5 and Qwen3-Next (gated "
    "delta networks), and Granite 4, Bamba, Falcon-H1 and Nemotron-H (Mamba-2)"
)


def load_config(source: str | Path | Source) -> "PretrainedConfig":
    """Load the transformers configuration of a checkpoint folder, GGUF file or hub id, and check its sizes.

    Raises:
        YggdrasilError: the model is missing, or its config.json is unreadable or inconsistent.
    """
    from transformers import AutoConfig  # imported late: later starts do not need it

    found = Source.find(source)
    register_family(found.folder)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(found.folder, local_files_only=True)
        text = config.get_text_config()
        layers = layer_configs(text) if getattr(text, "is_heterogeneous", False) else [text]
        fault = next((fault for layer in layers if (fault := _fault(layer)) is not None), None)
    except Exception as error:  # a field of a wrong type may raise anything where it is first used
        raise YggdrasilError(f"{found.given}: config.json could not be read: {one_line(error)}") from error
    if fault is not None:
        raise YggdrasilError(f"{found.given}: config.json is inconsistent: {fault}")
    return config


def _fault(config: "PretrainedConfig") -> str | None:
    """Return a description of an inconsistent size, or None if there is none or the model has no attention."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not hasattr(config, "hidden_size"):
        return None  # without attention; ``refuse_unverifiable`` rejects it
    kv_heads = getattr(config, "num_key_value_heads", None)
    kv_heads = heads if kv_heads is None else kv_heads
    if min(heads, kv_heads, config.vocab_size, config.hidden_size, config.num_hidden_layers) < 1:
        return "a size is not positive"
    if config.num_hidden_layers > MOST_LAYERS:
        return f"num_hidden_layers is {config.num_hidden_layers}, more than {MOST_LAYERS}"
    positions = getattr(config, "max_position_embeddings", None) or 0
    if not 0 <= positions <= _MOST_POSITIONS:
        return f"max_position_embeddings is {positions}, not from 0 to {_MOST_POSITIONS}"
    if heads % kv_heads:
        return f"num_key_value_heads ({kv_heads}) does not divide num_attention_heads ({heads})"
    if not getattr(config, "head_dim", None) and config.hidden_size % heads:
        return f"num_attention_heads ({heads}) does not divide hidden_size ({config.hidden_size})"
    return None


def refuse_unverifiable(config: "PretrainedConfig", name: str) -> None:
    """Check that one pass of the model with the configuration ``config`` can verify a tree of tokens.

    ``name`` is the model's name in messages.

    Raises:
        YggdrasilError: the model is an encoder-decoder or has no attention, or has layers with different numbers of
            query heads, unsupported recurrent layers, sparse attention by an indexer, or relative or ALiBi positions.
    """
    if config.is_encoder_decoder:
        raise YggdrasilError(f"{name} is an encoder-decoder model; Yggdrasil decodes decoder-only causal models")
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False) and len({each.num_attention_heads for each in layer_configs(text)}) > 1:
        raise YggdrasilError(f"{name} has layers that differ in their number of query heads, which is not served")
    layers = set(layer_types(text))
    if not hasattr(text, "num_attention_heads") or hasattr(text, "ssm_cfg") or hasattr(text, "state_size"):
        raise YggdrasilError(f"{name} ({config.model_type}) has recurrent layers alone and no attention: {_NO_TREE}")
    recurrent = sorted(layer for layer in layers if any(kind in layer for kind in _RECURRENT_LAYERS))
    if recurrent and Recurrence.of(text) is None:
        raise YggdrasilError(
            f"{name} ({config.model_type}) has recurrent layers ({', '.join(recurrent)}) of another kind: {_NO_TREE}"
        )
    if getattr(text, "index_topk", None):
        raise YggdrasilError(
            f"{name} ({config.model_type}) has an indexer that chooses the keys of every row (sparse attention), which "
            "is not served"
        )
    if getattr(text, "position_embedding_type", None) not in _POSITIONS or getattr(text, "alibi", False):
        raise YggdrasilError(
            f"{name} uses relative or ALiBi positions; only rotary and learned absolute positions are served"
        )


def load_tokenizer(source: str | Path | Source) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder, hub id or GGUF file.

    Raises:
        YggdrasilError: the model is missing, or its tokenizer cannot be loaded.
    """
    found = Source.find(source)
    try:
        tokenizer = open_tokenizer(found.folder)
        tokenizer.decode(tokenizer.encode("a b"))  # a setting of a wrong type fails where it is first used
    except Exception as error:  # the parser in Rust raises a bare Exception
        load_config(found)  # raises if the configuration, which tokenizers read too, is at fault
        raise YggdrasilError(f"{found.given}: the tokenizer could not be loaded: {one_line(error)}") from error
    return tokenizer


def check_drafter_tokenizer(tokenizer: Tokenizer, target: str | Source, drafter: str | Source) -> None:
    """Check that the model ``drafter`` has the same tokenizer as the model ``target``.

    ``tokenizer`` is the target's loaded tokenizer. Models are given as path, hub id or ``Source``. The drafter's
    tokenizer is loaded only if its files differ from the target's.

    Raises:
        YggdrasilError: the tokenizers differ, or the drafter's cannot be loaded.
    """
    one, other = Source.find(target), Source.find(drafter)
    files = [(one.folder / name, other.folder / name) for name in ("tokenizer.json", "tokenizer_config.json")]
    if not all(a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False) for a, b in files):
        check_same_tokenizer(tokenizer, load_tokenizer(other), (one.given, other.given))


def check_same_tokenizer(target: Tokenizer, drafter: Tokenizer, names: tuple[str, str]) -> None:
    """Check that two tokenizers have the same vocabulary and encode two samples equally.

    ``names`` are the names of target and drafter in messages. The sizes of the embeddings are not compared.

    Raises:
        YggdrasilError: the tokenizers differ. The message has the first difference.
    """
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    if ours != theirs:
        by_id = {i: token for token, i in ours.items()}, {i: token for token, i in theirs.items()}
        first = min(i for i in by_id[0].keys() | by_id[1].keys() if by_id[0].get(i) != by_id[1].get(i))
        raise YggdrasilError(
            f"{names[0]} and {names[1]} have different tokenizers: token {first} is {by_id[0].get(first)!r} in the "
            f"first and {by_id[1].get(first)!r} in the second; a drafter must share the target's tokenizer"
        )
    for text in ("def f(x):\n    return x", "Hello, wörld 123"):
        a, b = (tokenizer.encode(text, add_special_tokens=False) for tokenizer in (target, drafter))
        if a != b:
            raise YggdrasilError(
                f"{names[0]} and {names[1]} tokenize {text!r} differently: {a} and {b}; use a drafter with the same "
                "tokenizer"
            )
