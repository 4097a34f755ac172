"""The protocol of policies, and policies with the same decision in every iteration."""

from collections.abc import Sequence
from typing import Protocol

from yggdrasil.policy.objective import UNBOUNDED, Decision, ModelFree, StoppingBound, stopping_bound
from yggdrasil.predictor.features import Features
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape


class Policy(Protocol):
    """Protocol of policies, which choose the tree shapes of one request at a time."""

    wants_model_free: bool  # whether the engine grows model-free trees

    def begin(self) -> None:
        """Begin a request: drop the state of the last request, and keep the estimates."""

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return the decision for the next iteration, or None: call again with ``features``, which then gives one.

        A shape of depth 0 is a plain step. A shape of width 0 verifies only ``model_free``.

        Args:
            context: tokens in the target's cache.
            model_free: the tree that n-gram statistics have drafted, or None if there is none.
            features: input of the depth predictor, which may take a head draft to compute; None in the first call.
        """

    def bound(self, context: int, shape: TreeShape | None = None) -> StoppingBound:
        """Return the early-stopping bound: growth of a model-free tree ends when no further node can raise its value.

        The value is the objective value of the pass that verifies the tree.

        Args:
            context: tokens in the target's cache.
            shape: the drafted tree that the model-free drafts extend; None if they are verified alone.
        """

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        """Return ``decision`` with the verify width whose objective value is highest for the tree that was drafted.

        Args:
            decision: the decision by which the tree was drafted.
            expected: [V] tokens that the tree's scores predict at each verify width, bonus token included.
            context: tokens in the target's cache.
        """

    def observe(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        """Update the estimates of acceptance and latency by one finished iteration.

        Args:
            decision: the iteration's decision.
            tokens: tokens that the iteration added to the text, bonus token included.
            milliseconds: time of the whole iteration.
        """


class FixedPolicy:
    """Policy that chooses the same tree shape in every iteration. A draft width of 1 drafts a chain.

    Where ``wants_model_free`` is set, model-free drafts extend the tree.
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

    def bound(self, context: int, shape: TreeShape | None = None) -> StoppingBound:
        """Return a bound that ends growth when no further node can be among the best ``shape.verify_width``.

        Without ``shape``, growth is not bounded. ``context`` is not used.
        """
        return UNBOUNDED if shape is None else stopping_bound([shape.verify_width], [1.0])

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        """Return ``decision`` with the fixed verify width, whatever the expected tokens."""
        return decision._replace(shape=decision.shape._replace(verify_width=self._decision.shape.verify_width))

    def observe(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        """Do nothing: a fixed policy has no estimates."""


class ModelFreePolicy(FixedPolicy):
    """Policy that verifies ``verify_width`` nodes of every model-free tree, or decodes plainly without drafts."""

    wants_model_free = True

    def __init__(self, verify_width: int) -> None:
        super().__init__(PLAIN_STEP)
        self._verify_width = verify_width

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return a decision to verify ``model_free``, or a plain step if it is None or expects no accepted token.

        ``context`` and ``features`` are not used.
        """
        if model_free is None or model_free.expected[-1] <= 1.0:
            return self._decision
        return Decision(TreeShape(0, model_free.depth, self._verify_width))


PLAIN_POLICY = FixedPolicy(PLAIN_STEP)  # speculation off
