"""Load a causal language model for static-shape steps, and refuse what cannot be verified as a tree."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from yggdrasil.artifacts import check_weights
from yggdrasil.artifacts.gguf import read_gguf_header
from yggdrasil.errors import YggdrasilError, first_line, one_line
from yggdrasil.models.attention import ATTENTION_NAME
from yggdrasil.models.formats.file_rows import rows_of_file
from yggdrasil.models.formats.layers import QuantisedEmbedding, QuantisedLinear
from yggdrasil.models.formats.names import Weights
from yggdrasil.models.formats.rounding import rounding_to
from yggdrasil.models.formats.rows import Quantise
from yggdrasil.models.kernels import is_native
from yggdrasil.models.packing import pack_linears
from yggdrasil.models.source import Source

# Buffers that older checkpoints hold and every loader computes anew.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$|\.position_ids$")
_MOST_POSITIONS = 2**31 - 1
_RECURRENT_LAYERS = {"linear_attention", "mamba", "recurrent", "conv", "hybrid", "mamba2", "rwkv"}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be traced: packed linears, our attention, and its tensors by name."""

    name: str
    model: PreTrainedModel
    config: PretrainedConfig
    num_threads: int
    dtype: torch.dtype
    device: torch.device

    @property
    def max_context(self) -> int:
        """Positions the model was built for."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else 1 << 20

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: at least the tokens of the tokenizer, often padded."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.get_text_config().hidden_size)

    @property
    def formats(self) -> list[int]:
        """GGUF's numbers for the formats of quantised layers, in the model's order."""
        modules = self.model.modules()
        return [module.format for module in modules if isinstance(module, QuantisedLinear | QuantisedEmbedding)]

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers: what a step takes as its weights."""
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())


def load_model(
    source: str | Path | Source,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    *,
    pack: bool = True,
    weights: Weights = "full",
) -> LoadedModel:
    """Load a checkpoint folder, GGUF file or hub id, unmodified, and make it ready for static steps.

    ``weights`` "file" keeps the blocks of a GGUF file as they are; a format rounds every linear layer and the embedding
    to it: models of their own, with a quarter to a half of the bytes to read. On a CPU only.

    Raises:
        YggdrasilError: no such checkpoint, one that lacks weights of its model or holds others, or an architecture
            that tree masks cannot verify.
    """
    found = Source.find(source)
    config = load_config(found)
    refuse_unverifiable(config, found.given)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder = found.checkpoint(dtype)
    check_weights(folder)
    loader: Any = AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, ignore_mismatched_sizes=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # as with the configuration, which is used here
        raise YggdrasilError(f"{found.given} could not be loaded: {first_line(error)}") from error
    _refuse_gaps(report, found.given)
    model.eval()
    quantise = _quantise(model, found, weights, device)
    return prepare_model(model.to(device), found.given, num_threads, pack=pack, quantise=quantise)


def _refuse_gaps(report: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint that is not this model's, tensor for tensor; else what it lacks would stay random."""
    missing = sorted(report["missing_keys"])
    unexpected = sorted(key for key in report["unexpected_keys"] if not _IGNORED.search(key))
    misshapen = [f"{key} ({list(there)}, not {list(here)})" for key, there, here in sorted(report["mismatched_keys"])]
    faults = (("lacks", missing), ("holds, beyond what the model has,", unexpected), ("has misshapen", misshapen))
    said = [f"{verb} {_listed(keys)}" for verb, keys in faults if keys]
    if said:
        raise YggdrasilError(
            f"{name} {' and '.join(said)}: its weights are not those of its config.json; fetch the checkpoint again"
        )


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _quantise(model: PreTrainedModel, source: Source, weights: Weights, device: torch.device) -> Quantise | None:
    """Where quantised rows come from; None for full weights."""
    if weights == "full":
        return None
    if device.type != "cpu":
        raise YggdrasilError(f"--weights {weights} is for CPUs; on a GPU use --weights full")
    if not is_native():
        raise YggdrasilError(f"--weights {weights} needs the native kernels, which need a C++ compiler: install g++")
    if weights != "file":
        return rounding_to(weights, model)
    if source.gguf is None:
        raise YggdrasilError(f"--weights file reads the blocks of a GGUF file, and {source.given} is none; use q8_0")
    return rows_of_file(read_gguf_header(source.gguf), model.config)


def prepare_model(
    model: PreTrainedModel, name: str, num_threads: int, *, pack: bool = True, quantise: Quantise | None = None
) -> LoadedModel:
    """Plug our attention into a model that is already in memory and pack its linears, in place."""
    if not getattr(model, "_supports_attention_backend", False):
        raise YggdrasilError(
            f"{name}: {type(model).__name__} computes attention in its own way and offers no place for a tree mask; "
            "use a model whose transformers implementation supports attention backends"
        )
    model.requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    model.config.use_cache = True
    # What a pass returns is ours to say: a checkpoint's own wishes would cost time, or be of no use.
    model.config.output_hidden_states = model.config.output_attentions = False
    model.config.return_dict = True
    if pack:
        pack_linears(model, num_threads, quantise)
    return LoadedModel(name, model, model.config, num_threads, model.dtype, model.device)


def load_config(source: str | Path | Source) -> PretrainedConfig:
    """The configuration of a folder, GGUF file or hub id, with one sentence where there is none or it is odd."""
    found = Source.find(source)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(found.folder, local_files_only=True)
        fault = _fault(config.get_text_config())
    except Exception as error:  # a field of another type fails wherever it is first used
        raise YggdrasilError(f"{found.given}: config.json could not be read: {one_line(error)}") from error
    if fault is not None:
        raise YggdrasilError(f"{found.given}: config.json does not fit together: {fault}")
    return config


def _fault(config: PretrainedConfig) -> str | None:
    """What about the sizes of a model with attention cannot be; None where there is nothing."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not hasattr(config, "hidden_size"):
        return None  # a family of another kind, which is refused by name
    kv_heads = getattr(config, "num_key_value_heads", None)
    kv_heads = heads if kv_heads is None else kv_heads
    if min(heads, kv_heads, config.vocab_size, config.hidden_size, config.num_hidden_layers) < 1:
        return "a size is not positive"
    if (getattr(config, "max_position_embeddings", None) or 0) > _MOST_POSITIONS:
        return f"max_position_embeddings is more than {_MOST_POSITIONS}"
    if heads % kv_heads:
        return f"num_key_value_heads ({kv_heads}) does not divide num_attention_heads ({heads})"
    if not getattr(config, "head_dim", None) and config.hidden_size % heads:
        return f"num_attention_heads ({heads}) does not divide hidden_size ({config.hidden_size})"
    return None


def refuse_unverifiable(config: PretrainedConfig, name: str) -> None:
    """Refuse recurrent, hybrid and encoder-decoder models with the reason."""
    if config.is_encoder_decoder:
        raise YggdrasilError(f"{name} is an encoder-decoder model; Yggdrasil decodes decoder-only causal models")
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    recurrent = sorted(layer for layer in layers if any(kind in layer for kind in _RECURRENT_LAYERS))
    if recurrent or not hasattr(text, "num_attention_heads") or hasattr(text, "ssm_cfg") or hasattr(text, "state_size"):
        reason = (
            f"has {', '.join(recurrent)} layers" if recurrent else f"({config.model_type}) has no softmax attention"
        )
        raise YggdrasilError(
            f"{name} {reason}: a recurrent state holds one past only, so the branches of a tree cannot be verified in "
            "one pass; use a model with softmax attention in every layer"
        )
    if any("chunked" in layer for layer in layers):
        raise YggdrasilError(f"{name} attends in chunks (chunked_attention), which tree attention does not compute")
    if getattr(text, "kv_lora_rank", None):
        raise YggdrasilError(f"{name} uses multi-head latent attention, whose compressed cache is not served")
    if getattr(text, "position_embedding_type", "absolute") not in ("absolute", "rotary") or getattr(
        text, "alibi", False
    ):
        raise YggdrasilError(
            f"{name} uses relative or ALiBi positions; only rotary and learned absolute positions are served"
        )


def load_tokenizer(source: str | Path | Source) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint, or the one in a GGUF file."""
    found = Source.find(source)
    transformers_logging.set_verbosity_error()
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(found.folder, local_files_only=True)
        tokenizer.decode(tokenizer("a b")["input_ids"])  # a setting of another type fails where it is first used
    except Exception as error:  # whatever its files made of it: the parser in Rust raises a bare Exception
        load_config(found)  # which a tokenizer reads too: it may be what is wrong
        raise YggdrasilError(f"{found.given}: the tokenizer could not be loaded: {one_line(error)}") from error
    return tokenizer


def check_same_tokenizer(
    target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, names: tuple[str, str]
) -> None:
    """Refuse a pair whose token ids mean different texts, naming the first difference.

    Padded vocabularies (more rows in a model than tokens in its tokenizer) do not matter here.
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
        a, b = (tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in (target, drafter))
        if a != b:
            raise YggdrasilError(
                f"{names[0]} and {names[1]} tokenize {text!r} differently: {a} and {b}; use a drafter with the same "
                "tokenizer"
            )
