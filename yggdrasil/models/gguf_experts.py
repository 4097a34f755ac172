"""A mixture's experts in a GGUF file: its facts, and gate and up, one weight in the model and two tensors in the file.

Dims: E experts, I inner size of one, H hidden size.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.errors import YggdrasilError
from yggdrasil.models.experts import expert_parts

_COUNTS = {"llama": "num_local_experts", "qwen3moe": "num_experts"}  # what transformers calls how many there are
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_HALVES = (".experts.gate_proj.weight", ".experts.up_proj.weight")


def expert_facts(header: GgufHeader) -> dict[str, Any]:
    """How many experts there are, how many a row chooses and how large one is, in the words of transformers.

    None of a file that is no mixture's. Mixtral's are of the architecture llama.

    Raises:
        YggdrasilError: the file does not say, or rows would choose more experts than there are.
    """
    if header.architecture not in _COUNTS or (header.architecture == "llama" and not header.fact("expert_count")):
        return {}
    size = "feed_forward_length" if header.architecture == "llama" else "expert_feed_forward_length"
    names = ("expert_count", "expert_used_count", size)
    found = {name: header.fact(name) for name in names}
    scale = header.fact("expert_weights_scale", 1.0)  # what all weights of a row's experts are multiplied by
    are_counts = all(isinstance(fact, int) and fact > 0 for fact in found.values())
    if not are_counts or found["expert_used_count"] > found["expert_count"] or scale not in (0.0, 1.0):
        said = ", ".join(f"its {name} is {fact!r}" for name, fact in (found | {"expert_weights_scale": scale}).items())
        raise YggdrasilError(f"{shown(header.path)}: {said}, of which no mixture is made here; fetch the file again")
    count, used, inner = found.values()
    inner_name = "intermediate_size" if header.architecture == "llama" else "moe_intermediate_size"
    return {_COUNTS[header.architecture]: count, "num_experts_per_tok": used, inner_name: inner}


def apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model by name, those of experts as files hold them."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.endswith(_GATE_UP):
            experts = name.removesuffix(".gate_up_proj")
            found |= expert_parts(experts, weight, weights[f"{experts}.down_proj"])
        elif not name.endswith(_DOWN):
            found[name] = weight
    return found


def together(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """What ``apart`` took apart as models have it; of a gate or up, until the other comes, one is held."""
    waiting: dict[str, Tensor] = {}
    for name, weight in weights:
        if name.endswith(_HALVES):
            experts, _, part = name.removesuffix("_proj.weight").rpartition(".")
            other = waiting.pop(experts, None)
            if other is None:
                waiting[experts] = weight
            else:
                yield f"{experts}.gate_up_proj", torch.cat([weight, other] if part == "gate" else [other, weight], 1)
        else:
            yield name.removesuffix(".weight") if name.endswith(f"{_DOWN}.weight") else name, weight
