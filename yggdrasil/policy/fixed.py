"""Policies with the same decision in every iteration, for comparisons and uncalibrated models."""

from collections.abc import Sequence

from yggdrasil.policy.objective import UNBOUNDED, Decision, ModelFree, StoppingBound
from yggdrasil.predictor.features import Features
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape


class FixedPolicy:
    """Policy with one shape for every iteration. A width of 1 drafts a chain."""

    wants_model_free = False

    def __init__(self, shape: TreeShape) -> None:
        self._decision = Decision(shape, is_drafting=shape.depth > 0)

    def begin(self) -> None:
        """Do nothing: the policy has no state."""

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        return self._decision

    def bound(self, context: int, shape: TreeShape | None = None) -> StoppingBound:
        return UNBOUNDED

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        return decision._replace(shape=decision.shape._replace(verify_width=self._decision.shape.verify_width))

    def settle(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        """Do nothing: the policy has no estimates."""


class ModelFreePolicy(FixedPolicy):
    """Policy that verifies ``verify_width`` nodes of every model-free tree, and uses plain steps if it is empty."""

    wants_model_free = True

    def __init__(self, verify_width: int) -> None:
        super().__init__(PLAIN_STEP)
        self._verify_width = verify_width

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        if model_free is None or model_free.expected[-1] <= 1.0:
            return self._decision
        return Decision(TreeShape(0, model_free.depth, self._verify_width))


PLAIN_POLICY = FixedPolicy(PLAIN_STEP)  # speculation off
