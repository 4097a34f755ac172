"""What is trained: a drafter of one kind, what it reads of the target, and how it drafts while it is taught."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from yggdrasil.training.unroll import Batch, StepOutput


class Recipe(Protocol):
    """One kind of drafter for one target."""

    title: str  # of its card
    layers: tuple[int, ...]  # of the target, whose outputs it reads beside the state before the target's head
    vocabulary: Tensor  # [Vd] int64: the target's tokens that it learns to tell apart
    rate: float  # of learning
    num_taught: int  # draft steps that are taught

    def initial(self) -> nn.Module:
        """A drafter to begin with, in float32; always the same."""

    def steps(self, model: nn.Module, batch: Batch, count: int) -> Iterator[StepOutput]:
        """What ``model`` drafts at the learned places, by draft step; at most ``count`` steps."""

    def write(self, model: nn.Module, folder: Path) -> None:
        """Put the drafter in ``folder``, in its published format."""
