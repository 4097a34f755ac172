"""Policies with the same decision in every iteration, and the type of all policies."""

from collections.abc import Sequence
from typing import TypeAlias

from yggdrasil.policy.objective import Decision, ModelFree
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.predictor.features import Features
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape


class FixedPolicy:
    """Policy that chooses the same tree shape in every iteration. A draft width of 1 drafts a chain.

    If ``wants_model_free`` is set to True, the engine adds model-free drafts to each drafted tree.
    """

    wants_model_free = False

    def __init__(self, shape: TreeShape) -> None:
        self._decision = Decision(shape, is_drafting=shape.depth > 0)

    def begin(self) -> None:
        """Do nothing: a fixed policy has no state of a request."""

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return the fixed decision, whatever the arguments."""
        return self._decision

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        """Return ``decision`` with the fixed verify width.

        Args:
            expected: [V] expected tokens at each verify width; not used.
            context: tokens in the target's cache; not used.
        """
        return decision._replace(shape=decision.shape._replace(verify_width=self._decision.shape.verify_width))

    def observe(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        """Do nothing: a fixed policy has no estimates."""


class ModelFreePolicy(FixedPolicy):
    """Policy that verifies ``verify_width`` nodes of every model-free tree, and decodes plainly if there is no tree."""

    wants_model_free = True

    def __init__(self, verify_width: int) -> None:
        super().__init__(PLAIN_STEP)
        self._verify_width = verify_width

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return a decision to verify ``model_free``; a plain step if it is None or no accepted token is expected."""
        if model_free is None or model_free.expected[-1] <= 1.0:
            return self._decision
        return Decision(TreeShape(0, model_free.depth, self._verify_width))


Policy: TypeAlias = FixedPolicy | ObjectivePolicy  # chooses the tree shapes of one request at a time
PLAIN_POLICY = FixedPolicy(PLAIN_STEP)  # speculation off
