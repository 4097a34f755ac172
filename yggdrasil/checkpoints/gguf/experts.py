"""Mixture-of-experts in GGUF files: metadata, and weights. Gate and up are one weight in the model, two in the file.

The same holds for Granite's shared MLP, a linear layer.

Dims: E experts, I intermediate size of an expert, H hidden size.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.checkpoints.experts import expert_parts, form_of
from yggdrasil.checkpoints.gguf.recurrent import NEMOTRON
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# transformers' names of GGUF metadata, by architecture: number of experts, experts per token, and I.
_QWEN = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_SHARED = "expert_shared_feed_forward_length"
_WORDS = {
    "llama": {**_MIXTRAL, "feed_forward_length": "intermediate_size"},
    "qwen3moe": _QWEN,
    "qwen35moe": {**_QWEN, _SHARED: "shared_expert_intermediate_size"},
    "qwen3next": {**_QWEN, _SHARED: "shared_expert_intermediate_size"},
    "nemotron_h_moe": {
        **_QWEN, "expert_count": "n_routed_experts", _SHARED: "moe_shared_expert_intermediate_size",
    },
    "lfm2moe": _QWEN,
    "gemma4": {**_QWEN, "expert_used_count": "top_k_experts"},
    "granitehybrid": _MIXTRAL,
    "gpt-oss": {**_MIXTRAL, "expert_feed_forward_length": "intermediate_size"},
}  # fmt: skip
_MAY_BE_DENSE = ("llama", "granitehybrid", "gemma4")
_JOINED, _PARTS = ".shared_mlp.input_linear.weight", (".shared_mlp.gate_proj.weight", ".shared_mlp.up_proj.weight")


def expert_facts(header: GgufHeader) -> dict[str, Any]:
    """Return the configuration fields of a mixture of experts from a GGUF file's metadata, by transformers' names.

    The dictionary is empty if the model is no mixture. Mixtral's files have the architecture llama and differ from
    Llama's only by their number of experts.

    Raises:
        YggdrasilError: metadata is missing or inconsistent.
    """
    words = _WORDS.get(header.architecture)
    if words is None or (header.architecture in _MAY_BE_DENSE and not header.fact("expert_count")):
        return {}
    facts = {name: header.fact(name) for name in words}
    are_counts = all(isinstance(fact, int) and fact > 0 for fact in facts.values())
    scale = header.fact("expert_weights_scale", 1.0)  # of the sum of all experts: 1, or 0 for unset, but for Nemotron-H
    more = {"routed_scaling_factor": float(scale or 1.0)} if header.architecture in NEMOTRON else {}
    scale = 1.0 if more else scale
    if not are_counts or facts["expert_used_count"] > facts["expert_count"] or scale not in (0.0, 1.0):
        said = ", ".join(f"its {name} is {fact!r}" for name, fact in (facts | {"expert_weights_scale": scale}).items())
        raise YggdrasilError(f"{shown(header.path)}: {said}, which is unsupported; fetch the file again")
    return {words[name]: fact for name, fact in facts.items()} | more


def names_in_file(weight: str) -> tuple[str, ...]:
    """Return the names under which a GGUF file stores the parts of the transformers weight ``weight``.

    For Granite's fused linear layer the result is (gate's name, up's name), otherwise ``weight`` alone.
    """
    whole, is_joined = weight.removesuffix(_JOINED), weight.endswith(_JOINED)
    return tuple(whole + part for part in _PARTS) if is_joined else (weight,)


def name_in_model(part: str) -> str:
    """Return the name of the transformers weight to which the part named ``part`` in a GGUF file belongs.

    The name differs from ``part`` only for gate and up of Granite's fused linear layer.
    """
    return next((part.removesuffix(each) + _JOINED for each in _PARTS if part.endswith(each)), part)


def split_experts(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Return the weights of a transformers model by name, with gate and up of experts split as in GGUF files.

    Tied weights are included once.
    """
    found = own_weights(model)
    for name, module in model.named_modules():
        form = form_of(module)
        if form is None:
            continue
        for weight in [each for each in found if each.startswith(f"{name}.")]:
            del found[weight]
        parts = expert_parts(name, module, form)
        if _is_joined(model):
            parts = {f"{name}.{part}": getattr(module, part) for part in form.names}
        found |= parts
        biases = zip(("gate", "up", "down"), form.biases(module), strict=form.has_bias)
        found |= {f"{name}.{part}_proj.bias": bias for part, bias in biases}
    for name in [each for each in found if each.endswith(_JOINED)]:
        found |= zip(names_in_file(name), found.pop(name).chunk(2), strict=True)
    return found


def join_experts(weights: Iterable[tuple[str, Tensor]], model: "PreTrainedModel") -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a GGUF file, as (name, values), with gate and up of experts joined as ``model`` has them.

    Other weights are yielded unchanged. The first of gate and up is held in memory until the second arrives.
    """
    forms = {name: form for name, module in model.named_modules() if (form := form_of(module)) is not None}
    joined = {name for name in own_weights(model) if name.endswith(_JOINED)}
    waiting: dict[str, Tensor] = {}
    for name, weight in weights:
        if (whole := name_in_model(name)) in joined:
            other = waiting.pop(whole, None)
            if other is None:
                waiting[whole] = weight
            else:
                yield whole, torch.cat([weight, other] if name == names_in_file(whole)[0] else [other, weight])
            continue
        experts, _, part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        form = forms.get(experts)
        if form is None or _is_joined(model):
            yield name, weight
            continue
        suffix = "_bias" if name.endswith(".bias") else ""
        if part == "down_proj":
            yield f"{experts}.down_proj{suffix}", form.down(weight).contiguous()
            continue
        if not form.has_gate:
            yield f"{experts}.up_proj", weight
            continue
        other = waiting.pop(experts + suffix, None)
        if other is None:
            waiting[experts + suffix] = weight
        else:
            gate, up = (weight, other) if part == "gate_proj" else (other, weight)
            yield f"{experts}.gate_up_proj{suffix}", form.joined(gate, up)


def _is_joined(model: "PreTrainedModel") -> bool:
    """Return whether the file stores gate and up of an expert as one tensor, as in the model."""
    return bool(model.config.model_type == "gemma4_text")


def own_weights(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Return the parameters and stored buffers of a transformers model by name; tied parameters appear once."""
    tied = set(model.all_tied_weights_keys)
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}
