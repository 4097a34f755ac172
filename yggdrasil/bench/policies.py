"""Policies for comparisons only."""

from collections.abc import Sequence

from yggdrasil.engine.policy import Decision, Learner
from yggdrasil.predictor.evidence import Evidence
from yggdrasil.tree.objective import StepCosts, TreeShape, choose_verify_width


class PrunedPolicy:
    """One width and depth for every iteration; the verify width by the objective, once the tree is drafted."""

    learner: Learner | None = None

    def __init__(self, shape: TreeShape, costs: StepCosts) -> None:
        self._decision, self._costs = Decision(shape), costs

    def rest(self, context: int) -> Decision | None:
        return None

    def choose(self, evidence: Evidence) -> Decision:
        return self._decision

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        drafting_ms = self._costs.drafting_ms(shape.width, shape.depth)
        return Decision(shape._replace(verify_width=choose_verify_width(expected, drafting_ms, self._costs)))
