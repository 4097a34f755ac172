"""What to verify where a grammar leaves one continuation only: that, without asking any model or objective."""

from collections.abc import Callable, Sequence

from yggdrasil.engine.policy import Decision, Learner, Policy
from yggdrasil.engine.promises import KeptPromises
from yggdrasil.predictor.evidence import Evidence
from yggdrasil.tree.objective import TreeShape


class ForcedPolicy:
    """A policy for requests under a constraint: ``policy`` decides wherever the text is free.

    Forced tokens are verified like any others, since the target may spell the same text by other tokens.
    """

    def __init__(
        self, policy: Policy, num_forced: Callable[[], int], verify_widths: Sequence[int], max_depth: int
    ) -> None:
        self.learner: Learner | None = self if policy.learner is not None else None
        self._policy, self._num_forced = policy, num_forced
        self._verify_widths = list(verify_widths)
        self._deepest = min(max_depth, self._verify_widths[-1] - 1)
        self._forced_promises = KeptPromises()
        self._depth = 0  # of this iteration's forced path; 0 where the text is free

    def begin(self) -> None:
        assert self._policy.learner is not None
        self._policy.learner.begin()

    @property
    def promises(self) -> KeptPromises:
        """Kept apart where tokens are forced: what those give says nothing of the drafter."""
        learner = self._policy.learner
        return self._forced_promises if self._depth or learner is None else learner.promises

    def settle(self, decision: Decision, tokens: int, milliseconds: float, *, rested: bool) -> None:
        if self._policy.learner is not None and not self._depth:
            self._policy.learner.settle(decision, tokens, milliseconds, rested=rested)

    wants_free = False  # what a text repeats need not be what the grammar allows

    def free(self, expected: Sequence[float], depth: int, context: int) -> Decision | None:
        """None, as they are not wanted."""

    def rest(self, context: int) -> Decision | None:
        self._depth = min(self._num_forced(), self._deepest)
        return None if self._depth else self._policy.rest(context)

    def choose(self, evidence: Evidence) -> Decision:
        if not self._depth:
            return self._policy.choose(evidence)
        return Decision(TreeShape(1, self._depth, self._width), 1.0 + self._depth)

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        if not self._depth:
            return self._policy.prune(shape, expected, context)
        return Decision(shape._replace(verify_width=self._width), 1.0 + self._depth)

    @property
    def _width(self) -> int:
        return next(width for width in self._verify_widths if width > self._depth)
