"""The run-time policy: chooses among plain steps, model-free drafts and drafted trees, with online estimates.

``choose`` maximises equation 3 before drafting, ``prune`` over the verify widths of a drafted tree. ``settle`` updates
latency scales, acceptance corrections and regret budgets.

Dims: D depth levels, V verify widths.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from yggdrasil.policy.acceptance import AcceptanceCorrection, DepthPrediction, DraftedTrees
from yggdrasil.policy.costs import LatencyScales, StepCosts
from yggdrasil.policy.objective import (
    Decision,
    FloatArray,
    ModelFree,
    Objective,
    StoppingBound,
    best_width,
    objective_value,
    stopping_bound,
    update_correction,
    value_per_token,
)
from yggdrasil.policy.regret import PlainProbe, RegretBudget
from yggdrasil.predictor.features import Features
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape


class Policy(Protocol):
    """Protocol of policies, which choose the tree shapes of one request at a time."""

    wants_model_free: bool  # whether the engine grows model-free trees

    def begin(self) -> None:
        """Begin a request."""

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return the next iteration's shape after ``context`` tokens; None: call again with ``features``.

        A shape of depth 0 is a plain step. A shape of width 0 verifies only ``model_free``.
        """

    def bound(self, context: int, shape: TreeShape | None = None) -> StoppingBound:
        """Return the early-stopping bound of model-free drafts, alone or below a tree drafted as ``shape``."""

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        """Return ``decision`` with the best verify width of its drafted tree.

        ``expected`` [V] are the tokens expected by the tree's scores at each verify width, bonus included.
        """

    def settle(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        """Update the estimates by an iteration that committed ``tokens`` tokens in ``milliseconds``."""


class _Passes(NamedTuple):
    """Objective value per token at each verify width, given the time of the rest of an iteration, and its bound."""

    values: list[float]  # [V]
    bound: StoppingBound

    @classmethod
    def of(cls, costs: StepCosts, other_ms: float, objective: Objective) -> "_Passes":
        values = value_per_token(costs, other_ms, objective)
        return cls(values, stopping_bound(costs.verify_widths[1:], values[1:]))


class ObjectivePolicy:
    """Policy of the highest objective value, within a regret budget for each kind of speculation.

    ``costs`` maps context lengths to the step costs measured there. The nearest one is used, multiplied by the present
    latency scales. ``ratios``, ``mean_survival``, ``depth`` and ``added_tokens`` describe the drafter's trees
    (``DraftedTrees``); without ratios only model-free drafts are verified. ``is_head_first``: the head draft runs
    before the depth is chosen, so a plain step that is chosen then has cost a head draft.
    """

    def __init__(
        self,
        costs: Mapping[int, StepCosts],
        ratios: Mapping[int, FloatArray],
        mean_survival: FloatArray,
        depth: DepthPrediction | None,
        objective: Objective = "latency",
        *,
        is_head_first: bool = False,
        wants_model_free: bool = True,
        added_tokens: float | None = None,
    ) -> None:
        ordered = {context: costs[context] for context in sorted(costs)}
        self._borders = [(a + b) / 2 for a, b in pairwise(ordered)]
        self._costs = list(ordered.values())
        self._objective: Objective = objective
        self._is_head_first = is_head_first
        self.wants_model_free = wants_model_free
        self._drafted = (
            DraftedTrees(self._costs, ratios, mean_survival, depth, objective, added_tokens) if ratios else None
        )
        self._model_free = [_Passes.of(each, each.model_free_iteration_overhead_ms, objective) for each in self._costs]
        self._pruning: dict[tuple[int, int, int], _Passes] = {}  # by (index of costs, draft width, depth)
        self._scales, self._probe = LatencyScales(), PlainProbe()
        self._correction, self._budget = AcceptanceCorrection(), RegretBudget()  # of model-free drafts
        self._here = 0  # index of the costs in use
        self._steps = 0  # iterations of this request
        self._drafter_lags = False  # the drafter must prefill tokens before its next tree

    # ==== decisions ====

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        self._here = bisect_left(self._borders, context)
        plain = Decision(PLAIN_STEP, 1.0, self._plain_ms)
        if features is not None:
            return self._with_features(features, plain)
        if self._probe.is_due(self._steps):
            return plain
        free = None if model_free is None else self.best_model_free(model_free)
        best = free if free is not None and self._value(free) > self._value(plain) else plain
        if self._drafted is None or not self._drafted.budget.is_open:
            return best
        typical = self._drafted.typically(self._here, free)
        room = typical.tokens if model_free is None else min(typical.tokens, model_free.depth + 1.0)
        drafted = self._priced(typical.shape, room)
        is_better = self._value(drafted) > self._value(best)
        # With features a predictor may expect more tokens than of a typical tree.
        if is_better or (self._drafted.reads_features and best is plain):
            return None if self._drafted.reads_features else drafted
        return best

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        self._here = bisect_left(self._borders, context)
        return self._verified_at(
            decision, expected, best_width(expected, self._pruned(self._here, decision.shape).values)
        )

    def bound(self, context: int, shape: TreeShape | None = None) -> StoppingBound:
        here = bisect_left(self._borders, context)
        if shape is None:
            return update_correction(self._model_free[here].bound, self._correction.factor)
        return self._pruned(here, shape).bound

    def best_model_free(self, tree: ModelFree) -> Decision | None:
        """Return the decision with the best verify width above 1; None if ``tree`` is empty or the budget is closed."""
        if tree.expected[-1] <= 1.0 or not self._budget.is_open:
            return None
        widths, values = self._costs[self._here].verify_widths, self._model_free[self._here].values
        factor, most = self._correction.factor, tree.depth + 1.0
        best, likely, value = 1, 1.0, 0.0
        for index in range(1, len(widths)):  # without function calls, because the next pass waits for this
            tokens = 1.0 + (tree.expected[index] - 1.0) * factor
            if tokens > most:
                tokens = most
            if (found := tokens * values[index]) > value:
                best, likely, value = index, tokens, found
        shape = TreeShape(0, tree.depth, widths[best])
        milliseconds = self._costs[self._here].iteration_ms(*shape) * self._scales.of("model_free")
        return Decision(shape, likely, milliseconds, estimated=tree.expected[best])

    def _with_features(self, features: Features, plain: Decision) -> Decision:
        """Return the best drafted tree for ``features``, or a plain step if that is better."""
        assert self._drafted is not None, "there is nothing to draft"
        tree, survival = self._drafted.best(features, self._here)
        drafted = self._priced(tree.shape, tree.tokens)._replace(survival=survival)
        if self._value(drafted) > self._value(plain):
            return drafted
        head_ms = self._costs[self._here].head_ms * self._scales.of("drafted") if self._is_head_first else 0.0
        return plain._replace(milliseconds=plain.milliseconds + head_ms, is_drafting=True)

    def _pruned(self, here: int, shape: TreeShape) -> _Passes:
        """Return values and bound to prune a tree drafted as ``shape``."""
        key = here, shape.width, shape.depth
        if (found := self._pruning.get(key)) is None:
            costs = self._costs[here]
            other_ms = costs.drafting_ms(shape.width, shape.depth) + costs.overhead_ms
            found = self._pruning[key] = _Passes.of(costs, other_ms, self._objective)
        return found

    def _verified_at(self, decision: Decision, expected: Sequence[float], index: int) -> Decision:
        """Return ``decision`` with the verify width at ``index``."""
        shape = decision.shape._replace(verify_width=self._costs[self._here].verify_widths[index])
        return self._priced(shape, expected[index])._replace(survival=decision.survival)

    def _priced(self, shape: TreeShape, tokens: float) -> Decision:
        """Return a drafted tree's decision, with its milliseconds at the present latency scale."""
        milliseconds = self._costs[self._here].iteration_ms(*shape) * self._scales.of("drafted")
        return Decision(shape, tokens, milliseconds, is_drafting=True)

    def _value(self, decision: Decision) -> float:
        return objective_value(decision.tokens, decision.milliseconds, self._objective)

    @property
    def _plain_ms(self) -> float:
        return self._costs[self._here].plain_ms * self._scales.of("plain")

    # ==== learning ====

    def begin(self) -> None:
        self._budget.begin()
        if self._drafted is not None:
            self._drafted.begin()
        self._steps, self._drafter_lags = 0, True

    def settle(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        shape, kind, plain_ms = decision.shape, decision.kind, self._plain_ms
        gained = tokens - milliseconds / plain_ms
        if kind == "model_free":
            self._correction.observe(decision.estimated - 1.0, tokens - 1)
            self._budget.settle(gained)
        else:
            self._correction.decay()
            self._budget.earn()
        if self._drafted is not None:
            self._drafted.settle(decision, self._here, tokens, gained)
        # Trees before which the drafter prefills tokens are not representative, and are left out.
        if kind != "drafted" or (shape.depth and not self._drafter_lags):
            predicted_ms = plain_ms if kind == "plain" else decision.milliseconds
            self._scales.observe(kind, predicted_ms, milliseconds, is_cold=self._steps == 0)
        self._drafter_lags = kind == "model_free" or (kind == "plain" and self._drafter_lags)
        self._probe.observe(is_warm_plain=kind == "plain" and self._steps > 0)
        self._steps += 1

    def state(self) -> dict[str, Any]:
        """Return the online estimates as plain data."""
        return {
            "scales": self._scales.state(),
            "model_free": self._correction.state(),
            "model_free_budget": self._budget.state(),
            "drafted": None if self._drafted is None else self._drafted.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the estimates that ``state`` of a policy over the same shapes returned."""
        self._scales.restore(state["scales"])
        self._correction.restore(state["model_free"])
        self._budget.restore(state["model_free_budget"])
        if self._drafted is not None and state["drafted"] is not None:
            self._drafted.restore(state["drafted"])
