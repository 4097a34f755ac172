"""Base class of heads that predict the target's next hidden state: EAGLE-1, EAGLE-2 and multi-token prediction."""

from torch import Tensor

from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.layers import DraftingVocabulary


class StateHead(DraftingVocabulary):
    """A head that reads the input of the target's LM head and predicts the next such hidden state.

    Dims: H hidden size, Vd draft vocabulary.
    """

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.settings = settings
        self.lm_head = None

    def feature(self, states: Tensor) -> Tensor:
        """Return ``states`` [.., H], the target's hidden states, unchanged: they are the head's input features."""
        return states

    def fed_back(self, outputs: Tensor) -> Tensor:
        """Return the features [.., H] that tokens drafted after these read: the head's ``outputs``, unchanged."""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [.., Vd] over the draft vocabulary of the head's ``outputs`` [.., H]."""
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(outputs)
        return logits
