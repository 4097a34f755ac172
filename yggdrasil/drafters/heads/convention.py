"""Which layers a head means: writers of files count a layer by its input or by its output, and files do not say which.

A head that reads a neighbour of the layer that it was trained on still guesses, only worse, and nothing shows it. So it
is tried once on text that the target draws, under both readings; what came of it is kept in the user's cache.

Dims: B texts, T tokens.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.artifacts import model_fingerprint, shown, write_atomic
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.drafters.heads.loading import DraftingHead, LoadedHead
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.models.loaded import LoadedModel
from yggdrasil.models.runner import decoder_layers

_TEXTS, _OPENING, _LENGTH = 12, 4, 40
_LEAST = 0.02  # of the target's choices: a head that guesses fewer is another target's, or no head
_ALIKE = 0.01


class Reading(NamedTuple):
    """Layers by one convention, and the share of the target's choices that the head then guesses."""

    layers: tuple[int, ...]
    agreement: float

    def __str__(self) -> str:
        return f"{self.agreement:.0%} of its choices from the outputs of layers {', '.join(map(str, self.layers))}"


def settled(head: LoadedHead, target: LoadedModel, fingerprint: str) -> LoadedHead:
    """The head, reading the layers that it agrees with the target on; ``fingerprint`` is the target's.

    Raises:
        YggdrasilError: it agrees hardly ever, whatever it reads.
    """
    folder = Path(head.loaded.name)
    try:
        file = cache_root() / "heads" / f"{model_fingerprint(folder)}-{fingerprint}.json"
    except ArtifactError:  # a pickle has no fingerprint: it is tried every time
        file = None
    known = _known(file, head.readings)
    if known is not None:
        return head._replace(layers=known)
    best, other = _tried(head, target)
    if max(best.agreement, other.agreement) < _LEAST:
        raise YggdrasilError(
            f"{shown(folder)} guesses {best}, and {other}: it is a head of another target than {target.name}, or "
            "untrained"
        )
    is_clear = abs(best.agreement - other.agreement) >= _ALIKE
    doubt = f"; the other convention gives {other.agreement:.0%}" + ("" if is_clear else ", which hardly differs")
    print(f"yggdrasil: {shown(folder)} guesses {best}{doubt}", file=sys.stderr)  # noqa: T201
    if file is not None:
        write_atomic(file, json.dumps({"layers": best.layers}).encode())
    return head._replace(layers=best.layers)


def _known(file: Path | None, readings: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """What an earlier time found; None where there was none, or its file is damaged."""
    try:
        found = tuple(json.loads(file.read_bytes())["layers"]) if file is not None else ()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found in readings else None


def _tried(head: LoadedHead, target: LoadedModel) -> tuple[Reading, Reading]:
    """Both readings, the better one first; the usual one where they hardly differ."""
    usual, other = head.readings
    tokens, choices, outputs = _own_text(target, {*usual, *other})
    module: Any = head.loaded.model
    first, second = (Reading(each, _agreement(module, tokens, choices, outputs, each)) for each in (usual, other))
    return (second, first) if second.agreement >= first.agreement + _ALIKE else (first, second)


@torch.inference_mode()
def _own_text(target: LoadedModel, layers: set[int]) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Texts that the target draws [B, T], its choice after every token [B, T], and the outputs of ``layers``."""
    from yggdrasil.models.attention import own_attention  # brings transformers' models along

    model: Any = target.model
    outputs: dict[int, Tensor] = {}
    with own_attention(model), torch.random.fork_rng(), ExitStack() as hooks:
        torch.manual_seed(0)
        opening = torch.randint(0, target.vocab_size, (_TEXTS, _OPENING), device=target.device)
        tokens = model.generate(
            opening, attention_mask=torch.ones_like(opening), do_sample=True, max_new_tokens=_LENGTH,
            min_new_tokens=_LENGTH, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        for layer in layers:
            hooks.callback(_note(decoder_layers(model)[layer], outputs, layer))
        choices = model(tokens, use_cache=False).logits.argmax(-1)
    return tokens, choices, outputs


def _note(module: nn.Module, outputs: dict[int, Tensor], layer: int) -> Any:
    def note(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[layer] = output if isinstance(output, Tensor) else output[0]

    return module.register_forward_hook(note).remove


@torch.inference_mode()
def _agreement(
    module: DraftingHead, tokens: Tensor, choices: Tensor, outputs: dict[int, Tensor], layers: tuple[int, ...]
) -> float:
    states = torch.cat([outputs[layer] for layer in layers], dim=-1)[:, :-1]
    rows = torch.arange(states.shape[1], device=states.device)
    drafted = module.head(module.embedding(tokens[:, 1:]), module.head.feature(states), rows, _causal)
    guesses = module.head.target_tokens(module.head.logits(drafted).argmax(-1))
    # What it is made of says more of the opening than of the target.
    return float((guesses == choices[:, 1:])[:, _OPENING:].float().mean())


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    output: Tensor = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return output.transpose(1, 2)
