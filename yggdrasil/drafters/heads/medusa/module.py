"""Medusa heads as one module: from one hidden state, head d drafts the token d + 1 positions after the next token.

Parameters have the names of vLLM's files; parameters of files by Medusa's authors are renamed.

Dims: D heads, H hidden size, Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.drafters.heads.eagle.config import HEAD_INPUT
from yggdrasil.drafters.heads.layers import DraftingVocabulary


@dataclass(frozen=True)
class MedusaSettings:
    """Sizes of Medusa heads, read from their tensors: the numbers in configurations are not reliable."""

    num_heads: int
    num_layers: int  # residual blocks of a head
    hidden_size: int
    vocab_size: int  # the target's vocabulary
    draft_vocab_size: int
    has_bias: bool = True
    is_shared: bool = False  # all heads use one LM head
    has_own_vocabulary: bool = False  # the draft vocabulary is a subset of the target's

    def with_draft_vocabulary(self, count: int) -> "MedusaSettings":
        """Return the settings of the same heads with a draft vocabulary of ``count`` tokens."""
        return replace(self, draft_vocab_size=count, has_own_vocabulary=True)

    def readings(self, num_layers: int) -> list[tuple[int, ...]]:
        """Return the layers of the target whose outputs the heads read: [(-1,)], which stands for the LM head's input.

        ``num_layers`` is not used.
        """
        return [(HEAD_INPUT,)]


class _Block(nn.Module):
    def __init__(self, settings: MedusaSettings) -> None:
        super().__init__()
        size = settings.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=settings.has_bias) for _ in range(settings.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x


class MedusaHeads(DraftingVocabulary):
    """All Medusa heads. From the hidden state before a token they predict the tokens that follow this token."""

    def __init__(self, settings: MedusaSettings) -> None:
        super().__init__()
        self.settings = settings
        self.blocks = nn.ModuleList(_Block(settings) for _ in range(settings.num_heads))
        outputs = 1 if settings.is_shared else settings.num_heads
        self.lm_heads = nn.ModuleList(
            nn.Linear(settings.hidden_size, settings.draft_vocab_size, bias=False) for _ in range(outputs)
        )
        if settings.has_own_vocabulary:
            self.register_buffer("d2t", torch.zeros(settings.draft_vocab_size, dtype=torch.int64))

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [.., D, Vd] of hidden states [.., H], the inputs of the target's LM head.

        The target's LM head predicts the next token, and Medusa head d (from 0) the token d + 1 positions after it.
        """
        drafted = [block(states) for block in self.blocks]
        if self.settings.is_shared:
            logits: Tensor = self.lm_heads[0](torch.stack(drafted, dim=-2))
            return logits
        return torch.stack([head(each) for head, each in zip(self.lm_heads, drafted, strict=True)], dim=-2)

    def restrict_to(self, tokens: Tensor, rows: Callable[[nn.Module | None], nn.Module]) -> None:
        """Restrict drafting to the token ids ``tokens``; ``rows`` is called with the LM head of each Medusa head.

        Args:
            tokens: [Vd] int64 token ids of the target, ascending.
            rows: returns an LM head over ``tokens`` alone, given an LM head over all tokens.
        """
        self.lm_heads = nn.ModuleList(rows(each) for each in self.lm_heads)
        self._draft_only(tokens)
