"""Sample texts from a target, with the outputs of its layers that a head reads.

A target that native steps run is not built with transformers for it, which would take a minute for a GGUF file: its
texts are branches of one tree, so that a pass extends all of them by a token.

Dims: B texts, T tokens, H hidden size.
"""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.eagle.config import HEAD_INPUT
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.forward import ModelCall
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.native_steps.call import native_call
from yggdrasil.runtime.traced import decoder_layers

TEXTS, OPENING, LENGTH = 12, 4, 64  # texts, random tokens that begin each, and tokens sampled after these
_TEMPERATURE = 0.6  # below 1, so that the sampled texts resemble greedy output


class OwnText(NamedTuple):
    """Texts that a target sampled."""

    tokens: Tensor  # [B, T] int64
    choices: Tensor  # [B, T] int64, the target's argmax after every token
    outputs: dict[int, Tensor]  # [B, T, H] by layer


@torch.inference_mode()
def own_text(target: LoadedModel, layers: Collection[int]) -> OwnText:
    """Sample ``TEXTS`` texts from ``target``, the same ones every time, with the outputs of ``layers``."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        opening = torch.randint(0, target.vocab_size, (TEXTS, OPENING), device=target.device)
        if target.is_described:
            cache = StaticCache.allocate(target.outline, TEXTS * (OPENING + LENGTH), target.dtype, target.device)
            call = native_call(target, cache, target.vocab_size, sorted(layers))
            if call is not None:
                return _by_tree(call, opening)
        return _by_transformers(target, layers, opening)


def _by_tree(call: ModelCall, opening: Tensor) -> OwnText:
    """Sample by native passes: token t of text b is in slot ``t * B + b`` of a tree whose root has no context."""
    count = len(opening)
    tokens, choices, outputs = [opening.T.flatten()], list[Tensor](), list[list[Tensor]]()
    text = torch.arange(count).repeat(OPENING + LENGTH)  # by slot
    position = torch.arange(OPENING + LENGTH).repeat_interleave(count)
    while True:
        end = sum(map(len, tokens))
        start = end - len(tokens[-1])
        rows = slice(start, end)
        mask = (text[rows, None] == text[:end]) & (position[rows, None] >= position[:end])
        forward = call([], [], tokens[-1], position[rows].contiguous(), mask, torch.tensor([0, start]))
        choices.append(forward.logits.argmax(-1))
        outputs.append(forward.layers)
        if end == len(text):
            break
        tokens.append(_sampled(forward.logits[-count:]))

    def by_text(parts: list[Tensor]) -> Tensor:
        rows: Tensor = torch.cat(parts).unflatten(0, (-1, count))
        return rows.transpose(0, 1).contiguous()

    by_layer = [list(parts) for parts in zip(*outputs, strict=True)]
    return OwnText(
        by_text(tokens), by_text(choices), dict(zip(call.hidden_layers, map(by_text, by_layer), strict=True))
    )


def _sampled(logits: Tensor) -> Tensor:
    """Sample a token [R] from each row of ``logits`` [R, V] by a single coin; ``torch.multinomial`` throws V coins."""
    sums = (logits.float() / _TEMPERATURE).softmax(-1).cumsum(-1)
    coins = torch.rand(len(sums), 1) * sums[:, -1:]
    return torch.searchsorted(sums, coins)[:, 0].clamp(max=logits.shape[-1] - 1)


def _by_transformers(target: LoadedModel, layers: Collection[int], opening: Tensor) -> OwnText:
    from yggdrasil.runtime.attention import own_attention  # imports transformers' models

    model: Any = target.model
    outputs: dict[int, Tensor] = {}
    with own_attention(model), ExitStack() as hooks:
        tokens = model.generate(
            opening, attention_mask=torch.ones_like(opening), do_sample=True, temperature=_TEMPERATURE,
            max_new_tokens=LENGTH, min_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        hooks.callback(_note_input(model.get_output_embeddings(), outputs))
        for layer in set(layers) - {HEAD_INPUT}:
            hooks.callback(_note(decoder_layers(model)[layer], outputs, layer))
        choices = model(tokens, use_cache=False).logits.argmax(-1)
    return OwnText(tokens, choices, outputs)


def _note(module: nn.Module, outputs: dict[int, Tensor], layer: int) -> Any:
    def note(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[layer] = output if isinstance(output, Tensor) else output[0]

    return module.register_forward_hook(note).remove


def _note_input(module: nn.Module, outputs: dict[int, Tensor]) -> Any:
    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        outputs[HEAD_INPUT] = inputs[0]

    return module.register_forward_pre_hook(note).remove
