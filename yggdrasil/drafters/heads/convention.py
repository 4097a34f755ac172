"""Detect which of the target's layers a head was trained on.

A head's configuration lists layer numbers, but some writers number a layer by its input and others by its output, and
the files do not record which. A head that reads a neighbouring layer still drafts, only with lower acceptance. So the
head is evaluated once, under both conventions, on text sampled from the target, and the result is cached on disk.

Dims: B texts, T tokens.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from yggdrasil.artifacts import model_fingerprint, parse_json, shown, write_atomic
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.drafters.heads.block.module import BlockHead
from yggdrasil.drafters.heads.eagle.config import HEAD_INPUT
from yggdrasil.drafters.heads.loading import DraftingHead, LoadedHead
from yggdrasil.drafters.heads.medusa.module import MedusaHeads
from yggdrasil.drafters.heads.own_text import OPENING, own_text
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.runtime.loaded import LoadedModel

_LEAST = 0.02  # least share of argmax tokens: a head that predicts fewer belongs to another target or is untrained
_CLEAR = 2.0  # standard errors
_BLOCKS_APART = 8  # tokens between the evaluated blocks of a text, for a block head


class Reading(NamedTuple):
    """The layers that one convention selects, and how well the head then predicts the target's argmax tokens."""

    layers: tuple[int, ...]
    agreement: float  # share of argmax tokens that the head's argmax equals
    likelihoods: Tensor  # [N] log-probability of each argmax token; NaN for tokens outside the draft vocabulary

    def __str__(self) -> str:
        layers = f"the outputs of layers {', '.join(map(str, self.layers))}"
        source = "the states before its head" if self.layers == (HEAD_INPUT,) else layers
        return f"{self.agreement:.0%} from {source}"


def with_detected_layers(head: LoadedHead, target: LoadedModel, fingerprint: str) -> LoadedHead:
    """Return ``head`` with ``layers`` set to the element of ``readings`` that predicts the target's argmax tokens best.

    The head is evaluated once on text sampled from the target. The result is printed to stderr and cached on disk.

    Args:
        fingerprint: the target's fingerprint, which is part of the cached file's name.

    Raises:
        YggdrasilError: the head predicts less than 2 % of the target's argmax tokens under every reading.
    """
    folder = Path(head.loaded.name)
    file = cache_root() / "heads" / f"{model_fingerprint(folder)}-{fingerprint}.json"
    known = _known(file, head.readings)
    if known is not None:
        return head._replace(layers=known)
    best, *others = _tried(head, target)
    if max(each.agreement for each in (best, *others)) < _LEAST:
        raise YggdrasilError(
            f"{shown(folder)} hardly predicts the target's tokens, {', and '.join(map(str, (best, *others)))}: it is a "
            f"head of another target than {target.name}, or untrained"
        )
    doubt = ""
    for other in others:
        is_clear = _is_clearly_better(best, other)
        doubt = f"; from the neighbouring layers {other.agreement:.0%}" + ("" if is_clear else ", which hardly differs")
    print(f"yggdrasil: the head {shown(folder)} predicts the target's tokens: {best}{doubt}", file=sys.stderr)  # noqa: T201
    with suppress(ArtifactError):  # without the file the head is evaluated again at the next start
        write_atomic(file, json.dumps({"layers": best.layers}).encode())
    return head._replace(layers=best.layers)


def _known(file: Path, readings: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the cached layers, or None if there are none or the file is damaged."""
    try:
        found = tuple(parse_json(file.read_bytes())["layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found in readings else None


def _tried(head: LoadedHead, target: LoadedModel) -> list[Reading]:
    """Evaluate all readings, and return the best first, or the default convention's first if they hardly differ."""
    tokens, choices, outputs = own_text(target, {layer for layers in head.readings for layer in layers})
    module: Any = head.loaded.model
    readings = [_reading(module, tokens, choices, outputs, each) for each in head.readings]
    return readings[::-1] if _is_clearly_better(readings[-1], readings[0]) else readings


def _is_clearly_better(one: Reading, other: Reading) -> bool:
    """Return whether ``one`` gives the argmax tokens a mean log-probability higher than ``other`` by 2 standard errors.

    Hidden states of neighbouring layers are so similar that both readings have nearly the same argmax. The
    log-probabilities differ significantly on a tenth of the text that a comparison of argmax tokens needs.
    """
    more = (one.likelihoods - other.likelihoods).double()
    more = more[~more.isnan()]
    return len(more) > 1 and bool(more.mean() > _CLEAR * more.std() / len(more) ** 0.5)


@torch.inference_mode()
def _reading(
    module: DraftingHead, tokens: Tensor, choices: Tensor, outputs: dict[int, Tensor], layers: tuple[int, ...]
) -> Reading:
    states = torch.cat([outputs[layer] for layer in layers], dim=-1)[:, :-1]
    if isinstance(module.head, BlockHead):
        ends = torch.arange(1 + OPENING, tokens.shape[1], _BLOCKS_APART, device=tokens.device)
        logits, wanted = _block_logits(module, tokens, states, ends).float(), choices[:, ends]
    else:  # skip the random opening tokens, which the target did not sample
        logits, wanted = _logits(module, tokens, states)[:, OPENING:].float(), choices[:, 1:][:, OPENING:]
    drafted = module.head.target_tokens(torch.arange(logits.shape[-1], device=logits.device))
    number = torch.full((int(max(drafted.max(), choices.max())) + 1,), -1, device=logits.device)
    number[drafted] = torch.arange(len(drafted), device=logits.device)
    places = number[wanted]
    found = logits.log_softmax(-1).gather(-1, places.clamp(min=0)[..., None])[..., 0]
    agreement = float((logits.argmax(-1) == places).float().mean())
    return Reading(layers, agreement, found.masked_fill(places < 0, torch.nan).flatten())


def _logits(module: DraftingHead, tokens: Tensor, states: Tensor) -> Tensor:
    """Return the head's logits [B, T - 1, V] of the next token after each of ``tokens[:, 1:]``."""
    head: Any = module.head
    if isinstance(head, MedusaHeads):
        first: Tensor = head(states)[..., 0, :]
        return first
    rows = torch.arange(states.shape[1], device=states.device)
    logits: Tensor = head.logits(head(module.embedding(tokens[:, 1:]), head.feature(states), rows, _causal))
    return logits


def _block_logits(module: DraftingHead, tokens: Tensor, states: Tensor, ends: Tensor) -> Tensor:
    """Return the head's logits [B, E, V] of the next token after each index of ``ends`` [E] in ``tokens`` [B, T].

    The logits are those of the block pass, without the correction by a successor head.
    """
    head: Any = module.head
    rows = torch.arange(states.shape[1], device=states.device)
    context = head.context(states, rows)
    inside = torch.arange(head.settings.block_size, device=states.device)
    found = []
    for end in ends.tolist():
        block = torch.full((len(tokens), len(inside)), head.settings.mask_token, device=tokens.device)
        block[:, 0] = tokens[:, end]
        known = [(key[..., :end, :], value[..., :end, :]) for key, value in context]
        attends = [
            partial(_behind, *known[layer], sees=_seen(end, inside, *view))
            for layer, view in enumerate(head.settings.views)
        ]
        outputs = head(module.embedding(block), end + inside, attends.__getitem__)
        found.append(head.logits(outputs[:, head.settings.first_row]))
    return torch.stack(found, dim=1)


def _seen(end: int, inside: Tensor, window: int, is_causal: bool) -> Tensor:
    """Return the attention mask [N, end + N] of a block's N rows over ``end`` earlier rows and the block itself."""
    own = inside[:, None] >= inside if is_causal else torch.ones_like(inside[:, None] == inside)
    seen = torch.cat([own.new_ones(len(inside), end), own], dim=1)
    return seen & (seen.flip(1).cumsum(1).flip(1) <= window) if window else seen


def _behind(keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, *, sees: Tensor) -> Tensor:
    """Attend from a block's rows to the ``keys`` and ``values`` before the block and to those of the block."""
    keys, values = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
    output = functional.scaled_dot_product_attention(query, keys, values, attn_mask=sees, enable_gqa=True)
    return output.transpose(1, 2)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2)
