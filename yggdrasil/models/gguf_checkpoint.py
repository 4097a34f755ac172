"""A GGUF file as a checkpoint in Hugging Face layout: its facts and tokenizer, and its weights dequantised.

transformers reads such a file too, and its tables and tokenizer builders are used here. Its loader parses the file four
times and builds its table of names once a module: 30 s for 135M parameters where this takes five.
"""

from collections.abc import Collection, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.errors import YggdrasilError, first_line, one_line
from yggdrasil.models.gguf_experts import apart, expert_facts, together
from yggdrasil.models.shards import ShardWriter

# Architectures whose every fact is understood here, by the name that transformers has for them; each is tested against
# the model that was written.
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "qwen3moe": "qwen3_moe",
}  # fmt: skip
# Gemma's models of 27B, by their layers: scores are scaled by another number than the width of a head.
_MOST_LAYERS_OF_GEMMA = {"gemma2": 46, "gemma3": 62}
_NUM_SHARDS, _LEAST_SHARD = 8, 64 * 2**20
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
# What ends a turn in files that do not say so, as llama.cpp finds it too.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def write_facts(header: GgufHeader, folder: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer's files, chat template included.

    Raises:
        YggdrasilError: an architecture or a fact that is not understood, or no tokenizer in the file.
    """
    config = read_config(header)
    config.save_pretrained(folder)
    ends = _end_tokens(header)
    GenerationConfig(eos_token_id=ends or None, bos_token_id=config.bos_token_id).save_pretrained(folder)
    if not header.facts.get("tokenizer.ggml.tokens"):
        raise YggdrasilError(f"{shown(header.path)} holds no tokenizer; give a file that does, or a checkpoint folder")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(header.path.parent, gguf_file=header.path.name)
    except Exception as error:
        raise YggdrasilError(f"{shown(header.path)}: the tokenizer could not be read: {first_line(error)}") from error
    tokenizer.save_pretrained(folder)


def _end_tokens(header: GgufHeader) -> list[int]:
    """The tokens that end an answer: those that the file names, and where it names none for a turn, the usual ones."""
    named = {name: header.facts.get(f"tokenizer.ggml.{name}") for name in _END_TOKENS}
    ends = {int(token) for token in named.values() if isinstance(token, int)}
    tokens = header.facts.get("tokenizer.ggml.tokens")
    if named["eot_token_id"] is None and isinstance(tokens, list):
        ends |= {tokens.index(token) for token in _TURN_ENDS if token in tokens}
    return sorted(ends)


def read_config(header: GgufHeader) -> PretrainedConfig:
    """The configuration that the file's facts make.

    Raises:
        YggdrasilError: an architecture or a rotary scaling that is not understood, or a fact that is missing.
    """
    name = ARCHITECTURES.get(header.architecture)
    if name is None:
        raise YggdrasilError(
            f"{shown(header.path)} is of architecture {header.architecture}, which is not read from GGUF; "
            f"those that are: {', '.join(ARCHITECTURES)}. Give the checkpoint folder instead"
        )
    tables: dict[str, Any] = GGUF_CONFIG_MAPPING
    known = tables[name.removesuffix("_text")] | {
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
    }
    facts: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(name) or {})
    facts |= {ours: header.fact(theirs) for theirs, ours in known.items() if ours and header.fact(theirs) is not None}
    facts |= {ours: header.facts.get(f"tokenizer.{theirs}") for theirs, ours in tables["tokenizer"].items() if ours}
    facts["tie_word_embeddings"] = "output.weight" not in header.tensors
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise YggdrasilError(f"{shown(header.path)} lacks the tensor token_embd.weight; fetch the file again")
    if isinstance(blocks := header.fact("block_count"), int) and blocks > len(header.tensors):
        raise YggdrasilError(
            f"{shown(header.path)}: its block_count is {blocks}, and it has {len(header.tensors)} tensors; fetch the "
            "file again"
        )
    facts["vocab_size"] = embedding.shape[0]
    facts |= _rope_scaling(header)
    if header.architecture in _MOST_LAYERS_OF_GEMMA:
        facts |= _facts_of_gemma(header, facts)
    experts = expert_facts(header)
    kind = "mixtral" if experts and name == "llama" else name
    try:
        config: PretrainedConfig = AutoConfig.for_model(kind, **facts | experts)
    except Exception as error:
        raise YggdrasilError(f"{shown(header.path)}: the facts do not fit together: {one_line(error)}") from error
    model: Any = AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures = [model.__name__]
    return config


def _facts_of_gemma(header: GgufHeader, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma's files leave to their readers, and rotary positions of their two kinds of layers."""
    bounds = {name: header.fact(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    found: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    width = _head_width(header)
    if facts.get("num_hidden_layers") == _MOST_LAYERS_OF_GEMMA[header.architecture]:
        width = facts["hidden_size"] // facts["num_attention_heads"]
    found["query_pre_attn_scalar"] = width
    if header.architecture == "gemma3":
        everywhere = {"rope_type": "default", "rope_theta": _number(header, "rope.freq_base", 1e6)}
        near = {"rope_type": "default", "rope_theta": _number(header, "rope.freq_base_swa", 1e4)}
        found["rope_parameters"] = {
            "full_attention": facts.get("rope_parameters") or everywhere, "sliding_attention": near,
        }  # fmt: skip
    return found


def _rope_scaling(header: GgufHeader) -> dict[str, Any]:
    """What the rotary positions of the file's architecture are stretched by, in the words of transformers."""
    theta = _number(header, "rope.freq_base", 10000.0)
    factor = _number(header, "rope.scaling.factor", _number(header, "rope.scale_linear", 1.0))  # the older name
    # As llama.cpp has it, which stretches evenly unless told otherwise.
    kind = header.fact("rope.scaling.type", "none" if factor == 1.0 else "linear")
    turned, width = header.fact("rope.dimension_count"), _head_width(header)
    if turned is not None and width is not None and turned != width:
        raise _unread_rotation(header, f"of {turned} of {width} channels")
    if _ROPE_FACTORS in header.tensors:
        factors = _values(header, header.tensors[_ROPE_FACTORS])
        scaling = {"rope_type": "llama3", "rope_theta": theta, "factor": float(factors.max()), **_LLAMA3_ROPE}
        if np.allclose(factors, _llama3_factors(scaling, len(factors)), rtol=1e-3):
            return {"rope_parameters": scaling}
        kind = "of its own"
    if kind == "linear":
        return {"rope_parameters": {"rope_type": "linear", "rope_theta": theta, "factor": factor}}
    if kind != "none" or "rope_factors_long.weight" in header.tensors:
        raise _unread_rotation(header, kind if kind != "none" else "longrope")
    return {}


def _unread_rotation(header: GgufHeader, rule: object) -> YggdrasilError:
    return YggdrasilError(
        f"{shown(header.path)} stretches rotary positions by a rule ({rule}) that is not read from GGUF; give the "
        "checkpoint folder instead"
    )


def _head_width(header: GgufHeader) -> Any:
    """Channels of an attention head: where the file does not say, its share of the state."""
    size, heads = header.fact("embedding_length"), header.fact("attention.head_count")
    share = size // heads if isinstance(size, int) and isinstance(heads, int) and heads > 0 else None
    return header.fact("attention.key_length", share)


def _number(header: GgufHeader, name: str, default: float) -> float:
    """The fact ``name``; YggdrasilError where it is no positive number."""
    value = header.fact(name, default)
    if isinstance(value, bool | str | list) or not 0.0 < value < inf:
        raise YggdrasilError(
            f"{shown(header.path)}: its {name} is {value!r}, which is no positive number; fetch the file again"
        )
    return float(value)


def _llama3_factors(scaling: dict[str, Any], count: int) -> npt.NDArray[np.float64]:
    """What llama.cpp divides each rotary frequency by, for these parameters."""
    wavelength = 2 * np.pi * scaling["rope_theta"] ** (np.arange(count) / count)
    turns = scaling["original_max_position_embeddings"] / wavelength
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors


def write_weights(
    header: GgufHeader, config: PretrainedConfig, folder: Path, dtype: torch.dtype, but: Collection[str] = ()
) -> None:
    """Write every weight of the model in ``dtype`` as safetensors, an eighth of it in memory at a time.

    Those named by ``but``, which are read from the file itself, are left out.

    Raises:
        YggdrasilError: the file lacks a weight of the model, holds one that is not the model's, or of another shape.
    """
    total = sum(int(np.prod(tensor.shape)) for tensor in header.tensors.values()) * dtype.itemsize
    writer = ShardWriter(folder, max(_LEAST_SHARD, total // _NUM_SHARDS))
    for name, tensor in together(_weights(header, config, dtype, but)):
        writer.add(name, tensor)
    writer.close()


def _weights(
    header: GgufHeader, config: PretrainedConfig, dtype: torch.dtype, but: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    shapes = _expected_shapes(config)
    names = tensor_names(header, config, shapes)
    processor = _processor(header, config)
    for tensor in sorted(header.tensors.values(), key=lambda each: each.start):
        name = names.get(tensor.name)
        if name is None:
            continue
        if tensor.shape != shapes[name]:
            raise YggdrasilError(
                f"{shown(header.path)}: the tensor {tensor.name} has the shape {list(tensor.shape)} where the model "
                f"({name}) has {list(shapes[name])}; the file is damaged or its facts are of another model"
            )
        if name not in but:
            values = processor.process(_values(header, tensor), tensor.name).weights
            yield name, torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def _expected_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The weights of the model by name, those of experts as files hold them; tied ones once."""
    return {name: tuple(weight.shape) for name, weight in apart(own_weights(empty_model(config))).items()}


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model without its numbers."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def own_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Its parameters by name; tied ones once."""
    tied = set(model.all_tied_weights_keys)
    return {name: parameter for name, parameter in model.named_parameters() if name not in tied}


def row_order(header: GgufHeader, config: PretrainedConfig, tensor: GgufTensor) -> npt.NDArray[np.int64] | None:
    """Which of the file's rows each of the model's is; None where they are in one order.

    What is done to rows on the way to the model is done here to their numbers.
    """
    numbers = np.arange(tensor.shape[0])
    order: npt.NDArray[np.int64] = _processor(header, config).process(numbers[:, None], tensor.name).weights[:, 0]
    return None if np.array_equal(order, numbers) else order


def _processor(header: GgufHeader, config: PretrainedConfig) -> Any:
    return TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())  # type: ignore[no-untyped-call]


def tensor_names(
    header: GgufHeader, config: PretrainedConfig, shapes: dict[str, tuple[int, ...]] | None = None
) -> dict[str, str]:
    """The model's name of every tensor in the file; YggdrasilError where one has none, or a weight has no tensor."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    shapes = _expected_shapes(config) if shapes is None else shapes
    kind = next(key for key, value in MODEL_ARCH_NAMES.items() if value == header.architecture)
    table = get_tensor_name_map(kind, config.num_hidden_layers)
    names: dict[str, str] = {}
    for name in shapes:
        stem, _, suffix = name.rpartition(".")
        theirs = table.get_name(stem)
        names[f"{theirs}.{suffix}"] = name
    missing = sorted(names.keys() - header.tensors.keys())
    unknown = sorted(header.tensors.keys() - names.keys() - {_ROPE_FACTORS})
    if missing or unknown:
        what = f"lacks {_listed(missing)}" if missing else f"holds {_listed(unknown)}, unknown to this architecture"
        raise YggdrasilError(f"{shown(header.path)} {what}; it cannot be loaded as {header.architecture}")
    return names


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _values(header: GgufHeader, tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """One tensor in float32."""
    from gguf import GGMLQuantizationType, dequantize

    data = np.fromfile(header.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.start)
    kind = GGMLQuantizationType(tensor.kind)
    if kind == GGMLQuantizationType.F32:
        return data.view(np.float32).reshape(tensor.shape)
    rows = data.reshape(*tensor.shape[:-1], -1)
    try:
        values: npt.NDArray[np.float32] = dequantize(rows.view(np.float16) if kind.name == "F16" else rows, kind)
    except NotImplementedError as error:
        raise YggdrasilError(f"{shown(header.path)} stores {tensor.name} as {kind.name}, which is not read") from error
    return values.reshape(tensor.shape)
