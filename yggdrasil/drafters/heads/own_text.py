"""Sample texts from a target, with the outputs of the target's layers that a head reads.

The texts are branches of one tree, so that a pass extends all of them by a token.

Dims: B texts, T tokens, H hidden size.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.runner import ModelRunner

TEXTS, OPENING, LENGTH = 12, 4, 64  # texts, random tokens that begin each, and tokens sampled after these
_TEMPERATURE = 0.6  # below 1, so that the sampled texts resemble greedy output


class OwnText(NamedTuple):
    """Texts that a target sampled."""

    tokens: Tensor  # [B, T] int64
    choices: Tensor  # [B, T] int64, the target's argmax after every token
    outputs: dict[int, Tensor]  # [B, T, H] by layer


@torch.inference_mode()
def own_text(target: LoadedModel, layers: Collection[int]) -> OwnText:
    """Sample 12 texts of 68 tokens from ``target`` at temperature 0.6, with the outputs of ``layers`` at every token.

    The first 4 tokens of each are random. The seed is fixed, so the texts are always the same.

    Args:
        layers: indices of target layers; -1: the input of the LM head.
    """
    length = OPENING + LENGTH
    runner = ModelRunner(target, TEXTS * length, target.vocab_size, "uncompiled", sorted(layers))
    device = target.device
    generator = np.random.default_rng(0)  # PyTorch's numbers differ between devices
    # Token t of text b is in slot t * B + b of a tree whose root has no context.
    tokens = [torch.from_numpy(generator.integers(target.vocab_size, size=OPENING * TEXTS)).to(device)]
    choices, outputs = list[Tensor](), list[list[Tensor]]()
    text = torch.arange(TEXTS, device=device).repeat(length)  # by slot
    position = torch.arange(length, device=device).repeat_interleave(TEXTS)
    while True:
        end = sum(map(len, tokens))
        start = end - len(tokens[-1])
        rows = slice(start, end)
        mask = (text[rows, None] == text[:end]) & (position[rows, None] >= position[:end])
        offsets = torch.tensor([0, start], device=device)
        forward = runner.call(
            runner.weights, runner.cache.tensors(), tokens[-1], position[rows].contiguous(), mask, offsets
        )
        choices.append(forward.logits.argmax(-1))
        outputs.append(forward.layers)
        if end == len(text):
            break
        tokens.append(_sampled(forward.logits[-TEXTS:], generator))

    def by_text(parts: list[Tensor]) -> Tensor:
        found: Tensor = torch.cat(parts).unflatten(0, (-1, TEXTS))
        return found.transpose(0, 1).contiguous()

    by_layer = map(by_text, [list(parts) for parts in zip(*outputs, strict=True)])
    return OwnText(by_text(tokens), by_text(choices), dict(zip(runner.call.hidden_layers, by_layer, strict=True)))


def _sampled(logits: Tensor, generator: "np.random.Generator") -> Tensor:
    """Sample a token [R] from each row of ``logits`` [R, V] by a single coin; ``torch.multinomial`` throws V coins."""
    sums = (logits.float() / _TEMPERATURE).softmax(-1).cumsum(-1)
    coins = torch.from_numpy(generator.random((len(sums), 1), dtype=np.float32)).to(sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, coins)[:, 0].clamp(max=logits.shape[-1] - 1)
