"""What heads that draft the target's own states have in common: EAGLE-1 and 2, and multi-token prediction."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.layers import target_tokens


class StateHead(nn.Module):
    """Reads the state that the target's own head reads, drafts the next such state, and asks that head for its token.

    ``lm_head`` is the target's, lent when both are loaded, unless a file brings it: of all tokens, or of those that
    the head drafts among.

    Dims: H hidden size, Vd drafted tokens, all of the target's V unless told otherwise.
    """

    lm_head: nn.Module | None
    d2t: Tensor  # [Vd] int64, where they are not all: what to add to a drafted token to have the target's

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.settings = settings
        self.lm_head = None

    def draft_among(self, tokens: Tensor, output: nn.Module) -> None:
        """Draft ``tokens`` [Vd] of the target alone, by an ``output`` layer of their rows."""
        self.settings = replace(self.settings, draft_vocab_size=len(tokens))
        self.lm_head = output
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))

    def feature(self, states: Tensor) -> Tensor:
        """The target's state as it is."""
        return states

    def fed_back(self, outputs: Tensor) -> Tensor:
        """What the next drafted row reads as its feature."""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Of the drafted tokens, [.., Vd]."""
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(outputs)
        return logits

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """The target's tokens of drafted ones."""
        return target_tokens(drafted, self.d2t if self.settings.has_own_vocabulary else None)
