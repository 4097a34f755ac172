"""The values of one iteration, which its stages hand to each other and to the next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.engine.targets.target import Outcome
from yggdrasil.policy.decision import Decision
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

NO_TREE = Decision(PLAIN_STEP)  # decided by nobody: there is no room for a tree, or no drafter


class Emission(NamedTuple):
    """What an iteration made certain, for the books."""

    tokens: Sequence[int]
    shape: TreeShape
    decision: Decision


@dataclass(slots=True)
class Iteration:
    """Values of one iteration. Stages may run at the same time, so what the next one begins with has its own fields."""

    root: int  # last certain token
    decision: Decision | None = None  # the policy's; None: it waits for features
    shape: TreeShape = PLAIN_STEP
    is_decided: bool = False  # the shape is known before any stage runs
    previous: Emission | None = None  # not in the books yet
    ranking: npt.NDArray[np.int64] | None = None  # [N], nodes from best to worst
    outputs: Sequence[Tensor] = ()
    outcome: Outcome | None = None
    emission: Emission | None = None
    next_decision: Decision | None = None

    @property
    def drafts(self) -> bool:
        """Whether the drafter grows a tree."""
        return self.shape.width > 0 and self.shape.depth > 0

    @property
    def verifies_tree(self) -> bool:
        """Whether more than the root was verified."""
        return self.shape.verify_width > 1

    @property
    def verifies_drafts(self) -> bool:
        """Whether more was, and a drafter guessed it."""
        return self.verifies_tree and self.shape.width > 0

    def following(self) -> "Iteration":
        """The next iteration's values at its beginning."""
        assert self.outcome is not None
        return Iteration(self.outcome.tokens[-1], self.next_decision, previous=self.emission)
