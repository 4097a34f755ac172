"""Medusa's heads as one module: every head drafts one token further than the one before, all from one state.

Tensors have the names of vLLM's files; those of Medusa's own are renamed to them.

Dims: D heads, H hidden size, Vd draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.drafters.heads.eagle.config import HEAD_INPUT
from yggdrasil.drafters.heads.layers import target_tokens


@dataclass(frozen=True)
class MedusaSettings:
    """Sizes of Medusa's heads, as their tensors say: configurations name other numbers than files hold."""

    num_heads: int
    num_layers: int  # residual blocks of a head
    hidden_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    has_bias: bool = True
    is_shared: bool = False  # all heads read one output layer
    has_own_vocabulary: bool = False  # only some of the target's tokens can be drafted

    def readings(self, num_layers: int) -> list[tuple[int, ...]]:
        """The target's layers whose outputs the heads may mean."""
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


class MedusaHeads(nn.Module):
    """All heads: from the state before a token, guesses at those that follow the token."""

    d2t: Tensor  # [Vd] int64: what to add to a drafted token to have the target's

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
        """Logits [.., D, Vd] of states [.., H]: head d is about the token d places behind the next."""
        drafted = [block(states) for block in self.blocks]
        if self.settings.is_shared:
            logits: Tensor = self.lm_heads[0](torch.stack(drafted, dim=-2))
            return logits
        return torch.stack([head(each) for head, each in zip(self.lm_heads, drafted, strict=True)], dim=-2)

    def of_head(self, head: int, states: Tensor) -> Tensor:
        """Logits [.., Vd] of one head alone."""
        logits: Tensor = self.lm_heads[0 if self.settings.is_shared else head](self.blocks[head](states))
        return logits

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """The target's tokens of drafted ones."""
        return target_tokens(drafted, self.d2t if self.settings.has_own_vocabulary else None)
