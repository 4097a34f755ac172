"""A block head (DFlash) as a module whose parameters have the names of published files.

A block is the last accepted token followed by masks, each at its position; the output at a mask predicts the token
there. The rows attend to the block and to the earlier text. Keys and values of the earlier text are computed in every
layer from one feature per position, a projection of the target's hidden states. Embedding and LM head are the target's.

Dims: W rows, H hidden size, S concatenated hidden states of the target, Hkv key heads, D head size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.block.config import BlockSettings
from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.layers import Attend, Attention, FeedForward, Norm, RotaryEmbedding, target_tokens


class _Layer(nn.Module):
    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.input_layernorm = Norm(settings.hidden_size, settings.norm_eps)
        self.self_attn = Attention(settings, settings.hidden_size)
        self.post_attention_layernorm = Norm(settings.hidden_size, settings.norm_eps)
        self.mlp = FeedForward(settings)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), turn, attend)
        output: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return output


class BlockHead(nn.Module):
    """Layers that draft all tokens of a block at once, conditioned on the target's hidden states of the earlier text.

    ``lm_head`` is set to the target's when both are loaded, unless the file has one. It covers the draft vocabulary.
    """

    d2t: Tensor  # [draft vocabulary] int64: offset from a draft vocabulary id to the target's token id
    lm_head: nn.Module | None

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        self.settings = settings
        layer = settings.layer
        self.fc = nn.Linear(layer.num_states * layer.target_hidden_size, layer.hidden_size, bias=False)
        self.hidden_norm = Norm(layer.hidden_size, layer.norm_eps)
        self.layers = nn.ModuleList(_Layer(layer) for _ in range(settings.num_layers))
        self.norm = Norm(layer.hidden_size, layer.norm_eps)
        self.rotary = RotaryEmbedding(layer)
        self.lm_head = None
        if layer.has_own_vocabulary:
            self.register_buffer("d2t", torch.zeros(layer.draft_vocab_size, dtype=torch.int64))

    def draft_among(self, tokens: Tensor, output: nn.Module) -> None:
        """Restrict drafting to ``tokens`` [draft vocabulary] int64; ``output`` is an LM head with their rows."""
        layer = replace(self.settings.layer, draft_vocab_size=len(tokens))
        self.settings = replace(self.settings, layer=layer)
        self.lm_head = output
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))

    def context(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return every layer's keys and values, [.., Hkv, W, D] each, of ``states`` [.., W, S] at ``positions`` [W]."""
        features = self.hidden_norm(self.fc(states))
        turn = self.rotary(positions, features.dtype)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention.keys(features, turn) for attention in attentions]

    def forward(self, embedded: Tensor, positions: Tensor, attend: Callable[[int], Attend]) -> Tensor:
        """Return outputs [.., W, H] of a block's rows; ``attend(i)`` is the attention function of layer i."""
        turn = self.rotary(positions, embedded.dtype)
        for number, layer in enumerate(self.layers):
            embedded = layer(embedded, turn, attend(number))
        return embedded

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [.., draft vocabulary]."""
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(self.norm(outputs))
        return logits

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """Map draft vocabulary ids to the target's token ids."""
        return target_tokens(drafted, self.d2t if self.settings.layer.has_own_vocabulary else None)
