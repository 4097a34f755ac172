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

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_HALVES = (".experts.gate_proj.weight", ".experts.up_proj.weight")


def expert_facts(header: GgufHeader) -> dict[str, Any]:
    """How many experts there are, how many a row chooses and how large one is, in the words of transformers.

    Raises:
        YggdrasilError: the file does not say, or rows would choose more experts than there are.
    """
    count, used, inner = (header.fact(f"expert_{name}") for name in ("count", "used_count", "feed_forward_length"))
    if not all(isinstance(fact, int) and fact > 0 for fact in (count, used, inner)) or used > count:
        raise YggdrasilError(
            f"{shown(header.path)}: its expert_count is {count!r}, its expert_used_count {used!r} and its "
            f"expert_feed_forward_length {inner!r}, of which no mixture is made; fetch the file again"
        )
    return {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": inner}


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
