"""The protocol of training recipes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from yggdrasil.training.unroll import Batch, StepOutput


class Recipe(Protocol):
    """How to train one kind of drafter for one target: its modules, inputs, draft steps and file format."""

    title: str  # of the model card
    layers: tuple[int, ...]  # target layers whose outputs it reads, in addition to the LM head's input
    vocabulary: Tensor  # [Vd] int64: the target's tokens that it can draft
    rate: float  # learning rate
    num_taught: int  # draft steps in the training loss

    def initial(self) -> nn.Module:
        """Return an untrained drafter in float32; the same in every call."""

    def steps(self, model: nn.Module, batch: Batch, count: int) -> Iterator[StepOutput]:
        """Yield the logits of ``model`` at the trained positions, for at most ``count`` draft steps."""

    def write(self, model: nn.Module, folder: Path) -> None:
        """Write the drafter to ``folder`` in its published format."""
