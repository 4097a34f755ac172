"""The compiled step of a draft model that the host drives: rows in, rows of logits out.

Dims: W rows, T slots the mask covers, V vocabulary.
"""

from torch import Tensor

from yggdrasil.runtime.forward import ModelCall
from yggdrasil.runtime.traced import CallStep


class RowsStep(CallStep[ModelCall]):
    """Read W tokens, wherever in the text or the tree they are."""

    wide = (0, 1, 2)

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        positions: Tensor,  # [W] int64
        mask: Tensor,  # [W, T] bool over the slots from offsets[0] on
        offsets: Tensor,  # [2] int64: context length, first slot written
    ) -> tuple[Tensor]:
        """Returns (logits [W, V])."""
        return (self._call(weights, caches, tokens, positions, mask, offsets).logits,)
