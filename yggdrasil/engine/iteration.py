"""The state of one iteration, which its stages read and write, and what it passes on to the next one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.engine.targets.target import Outcome
from yggdrasil.policy.objective import Decision
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

NO_TREE = Decision(PLAIN_STEP)  # without the policy: the context has no room for a tree, or there is no drafter


class Emission(NamedTuple):
    """The tokens that an iteration made certain, with its shape and decision, for text and statistics."""

    tokens: Sequence[int]
    shape: TreeShape
    decision: Decision


@dataclass(slots=True)
class Iteration:
    """State of one iteration. Stages may run concurrently, so values for the next one have fields of their own."""

    root: int  # last certain token
    decision: Decision | None = None  # the policy's; None: it waits for features
    shape: TreeShape = PLAIN_STEP
    is_decided: bool = False  # the shape is known before any stage runs
    previous: Emission | None = None  # tokens whose text is not decoded yet
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
        """Whether the target verifies more than the root."""
        return self.shape.verify_width > 1

    @property
    def verifies_drafts(self) -> bool:
        """Whether the target verifies nodes that the drafter attached."""
        return self.verifies_tree and self.shape.width > 0

    def following(self) -> "Iteration":
        """The next iteration's values at its beginning."""
        assert self.outcome is not None
        return Iteration(self.outcome.tokens[-1], self.next_decision, previous=self.emission)
