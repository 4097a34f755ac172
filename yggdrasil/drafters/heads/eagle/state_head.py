"""Base class of heads that predict the target's next hidden state: EAGLE-1, EAGLE-2 and multi-token prediction."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.layers import target_tokens


class StateHead(nn.Module):
    """A head that reads the input of the target's LM head and predicts the next such hidden state.

    ``lm_head`` is set to the target's when both are loaded, unless the file has one. It covers the draft vocabulary.

    Dims: H hidden size, Vd draft vocabulary, by default the target's whole vocabulary.
    """

    lm_head: nn.Module | None
    d2t: Tensor  # [Vd] int64, with a draft vocabulary: offset from a draft vocabulary id to the target's token id

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.settings = settings
        self.lm_head = None

    def draft_among(self, tokens: Tensor, output: nn.Module) -> None:
        """Restrict drafting to ``tokens`` [Vd] int64; ``output`` is an LM head with their rows."""
        self.settings = replace(self.settings, draft_vocab_size=len(tokens))
        self.lm_head = output
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))

    def feature(self, states: Tensor) -> Tensor:
        """Return ``states`` [.., H] unchanged: the input feature is the target's hidden state."""
        return states

    def fed_back(self, outputs: Tensor) -> Tensor:
        """Return what the next drafted row reads as its feature [.., H]."""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [.., Vd] of ``outputs`` [.., H]."""
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(outputs)
        return logits

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """Map draft vocabulary ids to the target's token ids."""
        return target_tokens(drafted, self.d2t if self.settings.has_own_vocabulary else None)
