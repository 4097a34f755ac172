"""Which layers a head means: writers of files count a layer by its input or by its output, and files do not say which.

A head that reads a neighbour of the layer that it was trained on still guesses, only worse, and nothing shows it. So it
is tried once on text that the target draws, under both readings; what came of it is kept in the user's cache.

Dims: B texts, T tokens.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.artifacts import model_fingerprint, parse_json, shown, write_atomic
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.drafters.heads.block.module import BlockHead
from yggdrasil.drafters.heads.eagle.config import HEAD_INPUT
from yggdrasil.drafters.heads.loading import DraftingHead, LoadedHead
from yggdrasil.drafters.heads.medusa.module import MedusaHeads
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.traced import decoder_layers

_TEXTS, _OPENING, _LENGTH = 12, 4, 64
_TEMPERATURE = 0.6  # its likelier texts are nearer to what is decoded than what it would draw
_LEAST = 0.02  # of the target's choices: a head that guesses fewer is another target's, or no head
_CLEAR = 2.0  # standard errors
_BLOCKS_APART = 8  # tokens between the blocks of a text that a block head is tried with


class Reading(NamedTuple):
    """Layers by one convention, and what the head then makes of the target's choices."""

    layers: tuple[int, ...]
    agreement: float  # the share that it guesses
    likelihoods: Tensor  # [N] log-probability of each choice; not a number where it is none of the drafted tokens

    def __str__(self) -> str:
        layers = f"the outputs of layers {', '.join(map(str, self.layers))}"
        source = "the states before its head" if self.layers == (HEAD_INPUT,) else layers
        return f"{self.agreement:.0%} of its choices from {source}"


def settled(head: LoadedHead, target: LoadedModel, fingerprint: str) -> LoadedHead:
    """The head, reading the layers that it agrees with the target on; ``fingerprint`` is the target's.

    Raises:
        YggdrasilError: it agrees hardly ever, whatever it reads.
    """
    folder = Path(head.loaded.name)
    file = cache_root() / "heads" / f"{model_fingerprint(folder)}-{fingerprint}.json"
    known = _known(file, head.readings)
    if known is not None:
        return head._replace(layers=known)
    best, *others = _tried(head, target)
    if max(each.agreement for each in (best, *others)) < _LEAST:
        raise YggdrasilError(
            f"{shown(folder)} guesses {', and '.join(map(str, (best, *others)))}: it is a head of another target than "
            f"{target.name}, or untrained"
        )
    doubt = ""
    for other in others:
        is_clear = _is_clearly_better(best, other)
        doubt = f"; the other convention gives {other.agreement:.0%}" + ("" if is_clear else ", which hardly differs")
    print(f"yggdrasil: {shown(folder)} guesses {best}{doubt}", file=sys.stderr)  # noqa: T201
    with suppress(ArtifactError):  # it is tried again the next time
        write_atomic(file, json.dumps({"layers": best.layers}).encode())
    return head._replace(layers=best.layers)


def _known(file: Path, readings: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """What an earlier time found; None where there was none, or its file is damaged."""
    try:
        found = tuple(parse_json(file.read_bytes())["layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found in readings else None


def _tried(head: LoadedHead, target: LoadedModel) -> list[Reading]:
    """All readings, the best one first; the usual one where they hardly differ."""
    tokens, choices, outputs = _own_text(target, {layer for layers in head.readings for layer in layers})
    module: Any = head.loaded.model
    readings = [_reading(module, tokens, choices, outputs, each) for each in head.readings]
    return readings[::-1] if _is_clearly_better(readings[-1], readings[0]) else readings


def _is_clearly_better(one: Reading, other: Reading) -> bool:
    """Whether ``one`` finds the choices likelier, by more than these few might tell by chance.

    States of neighbouring layers are so alike that the guesses of both readings are nearly the same; their
    probabilities tell them apart on a tenth of the text.
    """
    more = (one.likelihoods - other.likelihoods).double()
    more = more[~more.isnan()]
    return len(more) > 1 and bool(more.mean() > _CLEAR * more.std() / len(more) ** 0.5)


@torch.inference_mode()
def _own_text(target: LoadedModel, layers: set[int]) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Texts that the target draws [B, T], its choice after every token [B, T], and the outputs of ``layers``."""
    from yggdrasil.runtime.attention import own_attention  # brings transformers' models along

    model: Any = target.model
    outputs: dict[int, Tensor] = {}
    with own_attention(model), torch.random.fork_rng(), ExitStack() as hooks:
        torch.manual_seed(0)
        opening = torch.randint(0, target.vocab_size, (_TEXTS, _OPENING), device=target.device)
        tokens = model.generate(
            opening, attention_mask=torch.ones_like(opening), do_sample=True, temperature=_TEMPERATURE,
            max_new_tokens=_LENGTH, min_new_tokens=_LENGTH, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        hooks.callback(_note_input(model.get_output_embeddings(), outputs))
        for layer in layers - {HEAD_INPUT}:
            hooks.callback(_note(decoder_layers(model)[layer], outputs, layer))
        choices = model(tokens, use_cache=False).logits.argmax(-1)
    return tokens, choices, outputs


def _note(module: nn.Module, outputs: dict[int, Tensor], layer: int) -> Any:
    def note(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[layer] = output if isinstance(output, Tensor) else output[0]

    return module.register_forward_hook(note).remove


def _note_input(module: nn.Module, outputs: dict[int, Tensor]) -> Any:
    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        outputs[HEAD_INPUT] = inputs[0]

    return module.register_forward_pre_hook(note).remove


@torch.inference_mode()
def _reading(
    module: DraftingHead, tokens: Tensor, choices: Tensor, outputs: dict[int, Tensor], layers: tuple[int, ...]
) -> Reading:
    states = torch.cat([outputs[layer] for layer in layers], dim=-1)[:, :-1]
    if isinstance(module.head, BlockHead):
        ends = torch.arange(1 + _OPENING, tokens.shape[1], _BLOCKS_APART, device=tokens.device)
        logits, wanted = _block_logits(module, tokens, states, ends).float(), choices[:, ends]
    else:  # what a text is opened with says more of the opening than of the target
        logits, wanted = _logits(module, tokens, states)[:, _OPENING:].float(), choices[:, 1:][:, _OPENING:]
    drafted = module.head.target_tokens(torch.arange(logits.shape[-1], device=logits.device))
    number = torch.full((int(max(drafted.max(), choices.max())) + 1,), -1, device=logits.device)
    number[drafted] = torch.arange(len(drafted), device=logits.device)
    places = number[wanted]
    found = logits.log_softmax(-1).gather(-1, places.clamp(min=0)[..., None])[..., 0]
    agreement = float((logits.argmax(-1) == places).float().mean())
    return Reading(layers, agreement, found.masked_fill(places < 0, torch.nan).flatten())


def _logits(module: DraftingHead, tokens: Tensor, states: Tensor) -> Tensor:
    """Of the first drafted token behind each of ``tokens`` but the first, from the states before them."""
    head: Any = module.head
    if isinstance(head, MedusaHeads):
        first: Tensor = head(states)[..., 0, :]
        return first
    rows = torch.arange(states.shape[1], device=states.device)
    logits: Tensor = head.logits(head(module.embedding(tokens[:, 1:]), head.feature(states), rows, _causal))
    return logits


def _block_logits(module: DraftingHead, tokens: Tensor, states: Tensor, ends: Tensor) -> Tensor:
    """Of the first drafted token behind each of the ``ends`` [E] of ``tokens`` [B, T], from the states before it."""
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
        found.append(head.logits(head(module.embedding(block), end + inside, attends.__getitem__)[:, 1]))
    return torch.stack(found, dim=1)


def _seen(end: int, inside: Tensor, window: int, is_causal: bool) -> Tensor:
    """Which of ``end`` rows before a block and of its own rows ``inside`` [B] each row sees, [B, end + B]."""
    own = inside[:, None] >= inside if is_causal else torch.ones_like(inside[:, None] == inside)
    seen = torch.cat([own.new_ones(len(inside), end), own], dim=1)
    return seen & (seen.flip(1).cumsum(1).flip(1) <= window) if window else seen


def _behind(keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, *, sees: Tensor) -> Tensor:
    """Attention of a block's rows to ``keys`` and ``values`` of the text before it and to their own."""
    groups = query.shape[1] // key.shape[1]
    both = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
    wide_key, wide_value = (each.repeat_interleave(groups, dim=1) for each in both)
    return functional.scaled_dot_product_attention(query, wide_key, wide_value, attn_mask=sees).transpose(1, 2)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    output: Tensor = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return output.transpose(1, 2)
