"""A block head (DFlash) as a module whose tensors have the names of published files.

A block is the last certain token and masks behind it, each at its position; the row of a mask says the token there. Of
the text before, the rows see what the target's states are made into: one feature a position, which every layer makes
its keys and values of. Embedding and output layer are the target's.

Dims: W rows, H hidden size, S the target's states side by side, Hkv key heads, D head size.
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
    """Layers that guess all tokens of a block at once, from the target's states of the text before it.

    ``lm_head`` is the target's, lent when both are loaded, unless a file brings it: of all tokens, or of those that
    the head drafts among.
    """

    d2t: Tensor  # [draft vocabulary] int64: what to add to a drafted token to have the target's
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
        """Draft ``tokens`` [draft vocabulary] of the target alone, by an ``output`` layer of their rows."""
        layer = replace(self.settings.layer, draft_vocab_size=len(tokens))
        self.settings = replace(self.settings, layer=layer)
        self.lm_head = output
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))

    def context(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [.., Hkv, W, D] of every layer, of the target's states [.., W, S] at ``positions`` [W]."""
        features = self.hidden_norm(self.fc(states))
        turn = self.rotary(positions, features.dtype)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention.keys(features, turn) for attention in attentions]

    def forward(self, embedded: Tensor, positions: Tensor, attend: Callable[[int], Attend]) -> Tensor:
        """Outputs [.., W, H] of a block's rows; ``attend`` gives the attention of each layer."""
        turn = self.rotary(positions, embedded.dtype)
        for number, layer in enumerate(self.layers):
            embedded = layer(embedded, turn, attend(number))
        return embedded

    def logits(self, outputs: Tensor) -> Tensor:
        """Of the draft vocabulary, [.., draft vocabulary]."""
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(self.norm(outputs))
        return logits

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """The target's tokens of drafted ones."""
        return target_tokens(drafted, self.d2t if self.settings.layer.has_own_vocabulary else None)
