"""What a policy decides, and what the engine asks of one.

Dims: D depth levels.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from yggdrasil.policy.costs import Kind
from yggdrasil.policy.stopping import StoppingBound
from yggdrasil.predictor.features import Features
from yggdrasil.tree.shape import TreeShape


class Decision(NamedTuple):
    """A tree shape, and what an iteration of it is expected to give and to take; 0 ms where no costs are known."""

    shape: TreeShape
    tokens: float = 1.0  # bonus included
    milliseconds: float = 0.0
    is_drafting: bool = False  # the drafter was asked: features were read, maybe its head ran, whatever the shape
    survival: npt.NDArray[np.float64] | None = None  # [D], as a depth predictor gave it
    estimated: float = 1.0  # tokens by the scores of a model-free tree, before correction

    @property
    def kind(self) -> Kind:
        """What is charged for the iteration, and followed by its latency scale."""
        if self.is_drafting:
            return "drafted"
        return "model_free" if self.shape.depth else "plain"


class ModelFree(NamedTuple):
    """A tree of model-free drafts: the tokens that its scores expect at each verify width, and its levels."""

    expected: Sequence[float]
    depth: int


class Policy(Protocol):
    """Decides the tree shapes of one request at a time."""

    wants_model_free: bool  # whether model-free drafts are made at all

    def begin(self) -> None:
        """A request begins."""

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return what the next iteration drafts, behind ``context`` tokens; None asks to be called with ``features``.

        A shape of depth 0 is a plain step; one of width 0 verifies ``model_free`` alone.
        """

    def bound(self, context: int, shape: TreeShape | None = None) -> StoppingBound:
        """Return the early-stopping bound of model-free drafts, alone or below a tree drafted as ``shape``."""

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        """Return ``decision`` with the width to verify its tree at.

        ``expected``: tokens by the tree's scores at each verify width, bonus included.
        """

    def settle(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        """An iteration by ``decision`` made ``tokens`` certain in ``milliseconds``."""
