"""Policies with the same decision in every iteration, for comparisons and uncalibrated models."""

from collections.abc import Sequence

from yggdrasil.policy.objective import UNBOUNDED, Decision, ModelFree, StoppingBound, stopping_bound
from yggdrasil.predictor.features import Features
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape


class FixedPolicy:
    """Policy that chooses the same tree shape in every iteration. A draft width of 1 drafts a chain.

    With ``wants_model_free`` model-free drafts extend the tree.
    """

    def __init__(self, shape: TreeShape, *, wants_model_free: bool = False) -> None:
        self._decision = Decision(shape, is_drafting=shape.depth > 0)
        self.wants_model_free = wants_model_free

    def begin(self) -> None:
        """Do nothing: a fixed policy has no state of a request."""

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return the fixed tree shape, whatever the context."""
        return self._decision

    def bound(self, context: int, shape: TreeShape | None = None) -> StoppingBound:
        """Return a bound by which a drafted tree is extended to about its verify width; others are grown in full."""
        return UNBOUNDED if shape is None else stopping_bound([shape.verify_width], [1.0])

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        """Return ``decision`` with the fixed verify width, whatever the expected tokens."""
        return decision._replace(shape=decision.shape._replace(verify_width=self._decision.shape.verify_width))

    def observe(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        """Do nothing: a fixed policy has no estimates."""


class ModelFreePolicy(FixedPolicy):
    """Policy that verifies ``verify_width`` nodes of every model-free tree, or decodes plainly without drafts."""

    def __init__(self, verify_width: int) -> None:
        super().__init__(PLAIN_STEP, wants_model_free=True)
        self._verify_width = verify_width

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return a decision to verify ``model_free``, or a plain step if it is None or expects no accepted token."""
        if model_free is None or model_free.expected[-1] <= 1.0:
            return self._decision
        return Decision(TreeShape(0, model_free.depth, self._verify_width))


PLAIN_POLICY = FixedPolicy(PLAIN_STEP)  # speculation off
