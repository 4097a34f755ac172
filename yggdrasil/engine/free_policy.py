"""The policy over drafters that cost no pass: a tree is always there, and how much of it to verify is the one decision.

A run's tokens and milliseconds add up; a ratio per iteration does not. So the width is chosen that gives most tokens
beyond what its milliseconds would have given at the run's own rate λ (the renewal-reward form of the paper's equation
3, whose fixed point the best constant choice is). A pass over the root alone is a plain step, and one of the widths.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

from yggdrasil.engine.gate import Gate
from yggdrasil.engine.policy import Decision, Learner
from yggdrasil.engine.promises import KeptPromises, Paces
from yggdrasil.predictor.evidence import Evidence
from yggdrasil.tree.objective import PLAIN_STEP, Objective, StepCosts, TreeShape

_MEMORY = 0.98  # of the run's tokens and milliseconds, an iteration
_UNTRIED = 0.998  # of what trees kept, a plain step: how soon a drafter that failed is tried again
_PRIOR_STEPS = 8  # plain steps that the run's rate begins with


class FreePolicy:
    """Verifies as many of the best nodes as are worth their time, behind a gate.

    ``costs`` maps context lengths to the step costs measured there; the nearest one serves, at the pace that plain
    steps and trees show today. ``depth`` levels are grown every time.
    """

    def __init__(self, costs: Mapping[int, StepCosts], depth: int, objective: Objective = "latency") -> None:
        ordered = {context: costs[context] for context in sorted(costs)}
        self._borders = [(a + b) / 2 for a, b in pairwise(ordered)]
        self._costs = list(ordered.values())
        self._objective: Objective = objective
        first = self._costs[0]
        self.grown = Decision(TreeShape(first.draft_widths[0], depth, first.verify_widths[-1]))
        self._tokens, self._ms = float(_PRIOR_STEPS), _PRIOR_STEPS * first.plain_ms
        self._here = 0  # costs of the last context that was asked for
        self._is_cold = True  # no step of this request has run
        self._gate, self._paces = Gate(), Paces()
        self.promises = KeptPromises()
        self.learner: Learner | None = self

    def begin(self) -> None:
        self._gate.begin()
        self._is_cold = True

    wants_free = False  # they are what is drafted

    def free(self, expected: Sequence[float], depth: int, context: int) -> Decision | None:
        """None: nothing else is drafted."""

    def rest(self, context: int) -> Decision | None:
        self._here = bisect_left(self._borders, context)
        return self._plain() if self._gate.is_paused() else None

    def choose(self, evidence: Evidence) -> Decision:
        return self.grown

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        costs, rate = self._costs[self._here], self._tokens / self._ms
        best = self._plain()
        value = self._value(1.0, best.milliseconds, rate)
        for width, tokens in zip(costs.verify_widths[1:], expected[1:], strict=True):
            milliseconds = (costs.verify_ms[width] + costs.overhead_ms) * self._paces.tree
            if (gain := self._value(tokens, milliseconds, rate)) > value:
                best, value = Decision(shape._replace(verify_width=width), tokens, milliseconds), gain
        return best

    def settle(self, decision: Decision, tokens: int, milliseconds: float, *, rested: bool) -> None:
        plain_ms = self._plain().milliseconds
        if decision.shape.verify_width == 1:
            self._gate.rested()
            self.promises.forget(_UNTRIED)  # what is not tried is believed in the end
            self._paces.follow_plain(plain_ms, milliseconds, is_cold=self._is_cold)
        else:
            self._gate.settle(tokens - milliseconds / plain_ms)
            self._paces.follow_tree(decision.milliseconds, milliseconds)
        self._tokens = _MEMORY * self._tokens + tokens
        self._ms = _MEMORY * self._ms + milliseconds
        self._is_cold = False

    def _plain(self) -> Decision:
        return Decision(PLAIN_STEP, 1.0, self._costs[self._here].plain_ms * self._paces.plain)

    def _value(self, tokens: float, milliseconds: float, rate: float) -> float:
        return tokens - rate * milliseconds if self._objective == "latency" else tokens
