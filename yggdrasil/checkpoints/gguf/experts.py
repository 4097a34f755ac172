"""A mixture's experts in a GGUF file: its facts, and gate and up, one weight in the model and two tensors in the file.

Dims: E experts, I inner size of one, H hidden size.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.checkpoints.experts import expert_parts
from yggdrasil.errors import YggdrasilError

# What transformers calls that which files of mixtures say: how many experts there are, how many a row chooses, and I.
_WORDS = {
    "llama": {
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
        "feed_forward_length": "intermediate_size",
    },
    "qwen3moe": {
        "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
}  # fmt: skip
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_HALVES = (".experts.gate_proj.weight", ".experts.up_proj.weight")


def expert_facts(header: GgufHeader) -> dict[str, Any]:
    """What the file says of its experts, in the words of transformers; nothing where it is of no mixture.

    Mixtral's files are of the architecture llama, and only their experts tell.

    Raises:
        YggdrasilError: something is not said, or rows would choose more experts than there are.
    """
    words = _WORDS.get(header.architecture)
    if words is None or (header.architecture == "llama" and not header.fact("expert_count")):
        return {}
    facts = {name: header.fact(name) for name in words}
    are_counts = all(isinstance(fact, int) and fact > 0 for fact in facts.values())
    scale = header.fact("expert_weights_scale", 1.0)  # of what all experts give: only 1 is known here, and 0 means it
    if not are_counts or facts["expert_used_count"] > facts["expert_count"] or scale not in (0.0, 1.0):
        said = ", ".join(f"its {name} is {fact!r}" for name, fact in (facts | {"expert_weights_scale": scale}).items())
        raise YggdrasilError(f"{shown(header.path)}: {said}, of which no mixture is made here; fetch the file again")
    return {words[name]: fact for name, fact in facts.items()}


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
