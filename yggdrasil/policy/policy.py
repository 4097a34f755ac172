"""The run-time policy: chooses among plain steps, model-free drafts and drafted trees, with online estimates.

``choose`` maximises equation 3 before drafting, ``prune`` over the verify widths of a drafted tree. ``observe`` updates
latency scales, the acceptance correction and regret budgets.

Dims: D depth levels, V verify widths.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from yggdrasil.policy.acceptance import AcceptanceCorrection, DepthPrediction, DraftedTrees
from yggdrasil.policy.costs import Kind, LatencyScales, StepCosts
from yggdrasil.policy.objective import (
    Decision,
    FloatArray,
    ModelFree,
    Objective,
    PassValues,
    StoppingBound,
    objective_value,
)
from yggdrasil.policy.regret import RegretBudget
from yggdrasil.predictor.features import Features
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape


class Policy(Protocol):
    """Protocol of policies, which choose the tree shapes of one request at a time."""

    wants_model_free: bool  # whether the engine grows model-free trees

    def begin(self) -> None:
        """Begin a request: the policy drops its state of the last request and keeps its estimates."""

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return the tree shape of the next iteration, or None to be called again with ``features``.

        A shape of depth 0 is a plain step. A shape of width 0 verifies only ``model_free``.

        Args:
            context: tokens in the target's cache.
            model_free: the tree that n-gram statistics have drafted, or None if there is none.
            features: input of the depth predictor, which may take a head draft to compute; None in the first call.
        """

    def bound(self, context: int, shape: TreeShape | None = None) -> StoppingBound:
        """Return the early-stopping bound: model-free nodes that cannot raise the objective value are not grown.

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


class ObjectivePolicy:
    """Policy that chooses the highest objective value, within a regret budget for each kind of speculation.

    ``costs`` maps context lengths to the step costs measured there. The nearest one is used, multiplied by the present
    latency scales. ``ratios``, ``mean_survival``, ``depth`` and ``added_tokens`` describe the drafter's trees
    (``DraftedTrees``); without ratios only model-free drafts are verified. ``is_head_first``: the head draft runs
    before the depth is chosen, so a plain step that is chosen afterwards has cost a head draft.
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
        self._model_free = [PassValues(each, each.model_free_iteration_overhead_ms, objective) for each in self._costs]
        self._pruning: dict[tuple[int, int, int], PassValues] = {}  # by (index of costs, draft width, depth)
        self._scales = LatencyScales(max(len(each.verify_widths) for each in self._costs))
        self._correction = AcceptanceCorrection()  # of model-free drafts
        self._budgets: dict[Kind, RegretBudget] = {"model_free": RegretBudget(), "drafted": RegretBudget()}
        self._here = self._scaled = 0  # index of the costs in use, and of those whose values are scaled
        self._steps = 0  # iterations of this request
        self._drafter_lags = False  # the drafter must prefill tokens before its next tree

    # ==== decisions ====

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return the tree shape of the next iteration with the highest objective value.

        None if ``features`` are needed to tell: the caller computes them and calls again.

        Args:
            context: tokens in the target's cache.
            model_free: the tree that n-gram statistics have drafted, or None if there is none.
            features: input of the depth predictor; None in the first call.
        """
        self._here = bisect_left(self._borders, context)
        plain = Decision(PLAIN_STEP, 1.0, self._plain_ms)
        if features is not None:
            return self._with_features(features, plain)
        best, value = plain, self._plain_value(plain)
        free = None if model_free is None else self.best_model_free(model_free)
        if free is not None and (found := self._value(free)) > value:
            best, value = free, found
        if self._drafted is None or not self._budgets["drafted"].is_open:
            return best
        typical = self._drafted.typical(self._here, free)
        room = typical.tokens if model_free is None else min(typical.tokens, model_free.depth + 1.0)
        drafted = self._priced(typical.shape, room)
        # With features a predictor may expect more tokens than of a typical tree.
        if self._value(drafted) > value or (self._drafted.reads_features and best is plain):
            return None if self._drafted.reads_features else drafted
        return best

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        """Return ``decision`` with the verify width of the highest objective value.

        ``expected`` [V] are the tokens that the drafted tree's scores predict at each verify width, bonus token
        included.
        """
        self._here = bisect_left(self._borders, context)
        return self._verified_at(decision, expected, self._pruned(self._here, decision.shape).best(expected)[0])

    def bound(self, context: int, shape: TreeShape | None = None) -> StoppingBound:
        """Return the early-stopping bound of model-free drafts in a tree drafted as ``shape``; None: of these alone."""
        here = bisect_left(self._borders, context)
        return self._free_passes(here).bound if shape is None else self._pruned(here, shape).bound

    def best_model_free(self, tree: ModelFree) -> Decision | None:
        """Return a decision to verify ``tree``, the n-gram statistics' drafts, at the best verify width above 1.

        None if the tree is expected to give no token, or the regret budget of model-free drafts is closed.
        """
        if tree.expected[-1] <= 1.0 or not self._budgets["model_free"].is_open:
            return None
        passes = self._free_passes(self._here)
        best, likely = passes.best(tree.expected, 1, self._correction.factor, tree.depth + 1.0)
        shape = TreeShape(0, tree.depth, self._costs[self._here].verify_widths[best])
        return Decision(shape, likely, passes.milliseconds[best], estimated=tree.expected[best])

    def _with_features(self, features: Features, plain: Decision) -> Decision:
        """Return the best drafted tree for ``features``, or a plain step if that is better."""
        assert self._drafted is not None, "there is nothing to draft"
        tree = self._drafted.best(features, self._here)
        drafted = self._priced(tree.shape, tree.tokens)
        if self._value(drafted) > self._plain_value(plain):
            return drafted
        head_ms = self._costs[self._here].head_ms * self._scales.factors[-1] if self._is_head_first else 0.0
        return plain._replace(milliseconds=plain.milliseconds + head_ms, is_drafting=True)

    def _free_passes(self, here: int) -> PassValues:
        """Return the values of passes with model-free drafts at the present latency and acceptance."""
        passes = self._model_free[here]
        if self._scaled != here:
            passes.scale(self._scales.factors, self._correction.factor)
            self._scaled = here
        return passes

    def _pruned(self, here: int, shape: TreeShape) -> PassValues:
        """Return the values of passes that verify a tree drafted as ``shape``."""
        key = here, shape.width, shape.depth
        if (found := self._pruning.get(key)) is None:
            costs = self._costs[here]
            other_ms = costs.drafting_ms(shape.width, shape.depth) + costs.overhead_ms
            found = self._pruning[key] = PassValues(costs, other_ms, self._objective)
        return found

    def _verified_at(self, decision: Decision, expected: Sequence[float], index: int) -> Decision:
        """Return ``decision`` with the verify width at ``index``."""
        shape = decision.shape._replace(verify_width=self._costs[self._here].verify_widths[index])
        return self._priced(shape, expected[index])

    def _priced(self, shape: TreeShape, tokens: float) -> Decision:
        """Return a drafted tree's decision, with its milliseconds at the present latency scale."""
        milliseconds = self._costs[self._here].iteration_ms(*shape) * self._scales.factors[-1]
        return Decision(shape, tokens, milliseconds, is_drafting=True)

    def _value(self, decision: Decision) -> float:
        return objective_value(decision.tokens, decision.milliseconds, self._objective)

    def _plain_value(self, plain: Decision) -> float:
        """Return the objective value that a tree must exceed."""
        return objective_value(1.0, plain.milliseconds * self._scales.plain_discount, self._objective)

    @property
    def _plain_ms(self) -> float:
        return self._costs[self._here].plain_ms * self._scales.factors[0]

    # ==== learning ====

    def begin(self) -> None:
        """Begin a request, and charge the first tree of the last request to the regret budgets."""
        for budget in self._budgets.values():
            budget.begin()
        self._steps, self._drafter_lags = 0, True

    def observe(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        """Update latency scales, acceptance correction and regret budgets by one finished iteration.

        Args:
            decision: the iteration's decision.
            tokens: tokens that the iteration added to the text, bonus token included.
            milliseconds: time of the whole iteration.
        """
        shape, kind, plain_ms = decision.shape, decision.kind, self._plain_ms
        has_read = kind == "drafted" and (self._drafter_lags or not shape.depth)  # besides what was predicted
        charged_ms = milliseconds if has_read else min(milliseconds, LatencyScales.PAUSE * decision.milliseconds)
        for each, budget in self._budgets.items():
            if each == kind:
                budget.add_tree(tokens - charged_ms / plain_ms)
            else:
                budget.earn()
        if kind == "model_free":
            self._correction.observe(decision.estimated - 1.0, tokens - 1)
        else:
            self._correction.decay()
        is_cold = self._steps == 0
        if kind == "plain":
            self._scales.observe(0, plain_ms, milliseconds, is_cold=is_cold)
        elif kind == "model_free":
            index = self._costs[self._here].verify_widths.index(shape.verify_width)
            self._scales.observe(index, decision.milliseconds, milliseconds, is_cold=is_cold)
        elif shape.depth and not self._drafter_lags:  # the time includes no prefill of the drafter
            self._scales.observe(-1, decision.milliseconds, milliseconds, is_cold=is_cold)
        self._drafter_lags = kind == "model_free" or (kind == "plain" and self._drafter_lags)
        self._scaled = -1
        self._steps += 1

    def state(self) -> dict[str, Any]:
        """Return latency scales, acceptance correction and regret budgets as plain data for JSON."""
        return {
            "scales": self._scales.state(),
            "model_free": self._correction.state(),
            "budgets": {kind: budget.state() for kind, budget in self._budgets.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the online estimates by ``state``, a result of ``state()`` of a policy over the same tree shapes.

        Raises:
            ValueError: ``state`` has another number of verify widths.
        """
        self._scales.restore(state["scales"])
        self._correction.restore(state["model_free"])
        for kind, budget in self._budgets.items():
            budget.restore(state["budgets"][kind])
        self._scaled = -1
