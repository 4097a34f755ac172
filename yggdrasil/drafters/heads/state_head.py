"""What heads that draft the target's own states have in common: EAGLE-1 and 2, and multi-token prediction."""

from torch import Tensor, nn

from yggdrasil.drafters.heads.settings import HeadSettings


class StateHead(nn.Module):
    """Reads the state that the target's own head reads, drafts the next such state, and asks that head for its token.

    ``lm_head`` is the target's, lent when both are loaded, unless a file brings it.

    Dims: H hidden size, V the target's vocabulary.
    """

    lm_head: nn.Module | None

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.settings = settings
        self.lm_head = None

    def feature(self, states: Tensor) -> Tensor:
        """The target's state as it is."""
        return states

    def fed_back(self, outputs: Tensor) -> Tensor:
        """What the next drafted row reads as its feature."""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Of the target's vocabulary, [.., V]."""
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(outputs)
        return logits

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """The target's tokens of drafted ones, which they are."""
        return drafted
