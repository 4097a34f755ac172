"""Who decides the shape of the next tree, and the simplest who do: always this one, or never any.

A policy answers at most three questions an iteration: whether to rest, the shape to draft (before the tree grows), and
what of it to verify (after it). Those that learn from what came of it name a ``learner``, which is asked first whether
to verify guesses that cost no pass.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from yggdrasil.engine.promises import KeptPromises
from yggdrasil.predictor.evidence import Evidence
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.stakes import NO_STAKES, Stakes


class Decision(NamedTuple):
    """A shape, and what an iteration of it should give and take; 0 ms where nothing is known of costs.

    ``believed``: survival [D] as it was predicted, where it was; its policy's own matter.
    """

    shape: TreeShape
    tokens: float = 1.0  # bonus included
    milliseconds: float = 0.0
    believed: npt.NDArray[np.float64] | None = None

    def slowed(self, times: float) -> "Decision":
        """The same on a machine that is so many times slower."""
        return Decision(self.shape, self.tokens, self.milliseconds * times, self.believed)


class Learner(Protocol):
    """What a policy learns by: it is told what came of each iteration. Asked first, it may do without a drafter."""

    @property
    def promises(self) -> KeptPromises:
        """Of the trees that it asked for."""

    def begin(self) -> None:
        """A new request."""

    @property
    def wants_free(self) -> bool:
        """Whether guesses that cost no pass are to be made at all, alone or in a drafted tree."""

    def stakes(self, context: int) -> Stakes:
        """What ``free`` will go by: nodes that cannot change its answer need not be guessed."""

    def stakes_beside(self, shape: TreeShape, context: int) -> Stakes:
        """What ``prune`` will go by, for guesses that cost no pass in a tree that was drafted as ``shape``."""

    def free(self, expected: Sequence[float], depth: int, context: int) -> Decision | None:
        """How many nodes of the tree that cost no pass to verify instead of a drafted one; its shape has width 0.

        ``expected``: tokens by its scores for each admissible width, 1 where nothing is guessed. None: the policy is to
        be asked.
        """

    def settle(
        self, decision: Decision, tokens: int, milliseconds: float, *, rested: bool, pass_ms: float | None = None
    ) -> None:
        """An iteration by ``decision`` took so long and made ``tokens`` certain, an end of the text among them or not.

        ``rested``: no shape was asked for. ``pass_ms``: of the time, the target's pass; None where nobody could tell.
        """


class Policy(Protocol):
    """Decides tree shapes for one request."""

    learner: Learner | None

    def rest(self, context: int) -> Decision | None:
        """A plain step without looking at any evidence, or None to be asked for a shape."""

    def choose(self, evidence: Evidence) -> Decision:
        """Shape for the tree below the last certain token; depth 0 is a plain step."""

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        """``shape`` with the width to verify it at, given the expected tokens for each admissible width."""


class FixedPolicy:
    """One shape for every iteration: a chain where ``width`` is 1. For comparisons, and without a calibration."""

    learner: Learner | None = None

    def __init__(self, shape: TreeShape) -> None:
        self._decision = Decision(shape)

    def rest(self, context: int) -> Decision | None:
        return None if self._decision.shape.depth else self._decision

    def choose(self, evidence: Evidence) -> Decision:
        return self._decision

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        return Decision(shape._replace(verify_width=self._decision.shape.verify_width))


class FreeTreePolicy(FixedPolicy):
    """As many nodes of every tree that costs no pass; plain steps where there is none."""

    wants_free = True

    def __init__(self, verify_width: int) -> None:
        super().__init__(PLAIN_STEP)
        self.learner, self.promises, self._verify_width = self, KeptPromises(), verify_width

    def begin(self) -> None:
        """Nothing is kept."""

    def settle(
        self, decision: Decision, tokens: int, milliseconds: float, *, rested: bool, pass_ms: float | None = None
    ) -> None:
        """Nothing is learned."""

    def stakes(self, context: int) -> Stakes:
        return NO_STAKES

    def stakes_beside(self, shape: TreeShape, context: int) -> Stakes:
        return NO_STAKES

    def free(self, expected: Sequence[float], depth: int, context: int) -> Decision | None:
        return Decision(TreeShape(0, depth, self._verify_width)) if expected[-1] > 1.0 else None


PLAIN_POLICY = FixedPolicy(PLAIN_STEP)  # speculation off
