"""The run-time policy: chooses among plain steps, model-free drafts and drafted trees, with online estimates.

``choose`` maximises equation 3 before drafting, ``prune`` over the verify widths of a drafted tree. ``observe`` updates
latency scales, the acceptance correction and regret budgets.

Dims: D depth levels, V verify widths.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log
from typing import Any

from yggdrasil.policy.costs import Kind, StepCosts
from yggdrasil.policy.objective import (
    Decision,
    DepthPrediction,
    DraftedTrees,
    FloatArray,
    ModelFree,
    Objective,
    PassValues,
    objective_value,
)
from yggdrasil.predictor.features import Features
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

DECAY = 0.98  # factor of the moving averages per iteration
PRIOR = 4.0  # tokens with a correct estimate: the weight of the prior
INHERITED = 12.0  # tokens, prior included: the greatest weight of earlier requests' estimates in a new request


class ObjectivePolicy:
    """Policy that chooses the highest objective value, within a regret budget for each kind of speculation.

    ``costs`` maps context lengths (tokens) to the step costs measured there. The costs of the nearest length are used,
    multiplied by the present latency scales. ``ratios``, ``mean_survival``, ``depth`` and ``added_tokens`` describe the
    drafter's trees (``DraftedTrees``); if ``ratios`` is empty, only model-free drafts are verified. ``is_head_first``
    says that the head draft runs before the depth is chosen, so that a plain step chosen afterwards includes its time.
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
        self._correction = AcceptanceCorrection()  # of the accepted tokens of model-free drafts
        self._added = AcceptanceCorrection()  # of the accepted tokens that drafting adds to model-free drafts
        self._budgets: dict[Kind, RegretBudget] = {"model_free": RegretBudget(), "drafted": RegretBudget()}
        self._here = self._scaled = 0  # index of the costs in use, and of those whose values are scaled
        self._is_cold = True  # no iteration of this request is finished
        self._drafter_lags = False  # the drafter must prefill tokens before its next tree

    # ==== decisions ====

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return the next iteration's decision with the highest objective value, or None: call again with ``features``.

        Without ``features``, a plain step, ``model_free`` and a typical drafted tree are compared; with them, a plain
        step and the drafted tree that the depth predictor expects to be best. A kind whose regret budget is closed is
        left out.

        Args:
            context: tokens in the target's cache.
            model_free: the tree that n-gram statistics have drafted, or None if there is none.
            features: input of the depth predictor; None in the first call.
        """
        self._here = bisect_left(self._borders, context)
        plain = Decision(PLAIN_STEP, 1.0, self._plain_ms)
        if features is not None:
            return self._with_features(features, plain)
        free = None if model_free is None else self.best_model_free(model_free)
        without = plain if free is None else max(plain, free, key=self._value)
        if self._drafted is None or not self._budgets["drafted"].is_open:
            return without
        best = max(without, self._typical(model_free, free, without), key=self._value)
        # With features a predictor may expect more tokens than of a typical tree.
        return None if self._drafted.reads_features and (best is plain or best is not without) else best

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        """Return ``decision`` with the verify width of the highest objective value, its expected tokens and time.

        Args:
            expected: [V] tokens that the drafted tree's scores predict at each verify width, bonus token included.
            context: tokens in the target's cache.
        """
        self._here = bisect_left(self._borders, context)
        return self._verified_at(decision, expected, self._drafted_passes(self._here, decision.shape).best(expected)[0])

    def best_model_free(self, tree: ModelFree) -> Decision | None:
        """Return a decision to verify ``tree``, the n-gram statistics' drafts, at the best verify width above 1.

        Returns None if no drafted token is expected to be accepted, or if the regret budget of model-free drafts is
        closed. The costs are those of the context length of the last ``choose`` or ``prune``.
        """
        if tree.expected[-1] <= 1.0 or not self._budgets["model_free"].is_open:
            return None
        passes = self._free_passes(self._here)
        best, likely = passes.best(tree.expected, 1, self._correction.factor, tree.depth + 1.0)
        shape = TreeShape(0, tree.depth, self._costs[self._here].verify_widths[best])
        return Decision(shape, likely, passes.milliseconds[best], estimated=tree.expected[best])

    def _typical(self, model_free: ModelFree | None, free: Decision | None, without: Decision) -> Decision:
        """Return the decision for a typical drafted tree, which ``model_free`` extends if there is one.

        ``free`` is the decision to verify ``model_free`` alone, ``without`` the best decision without the drafter.
        """
        assert self._drafted is not None, "there is nothing to draft"
        typical = self._drafted.typical(self._here, free, self._added.factor)
        if model_free is None:
            return self._priced(typical.shape, typical.tokens)
        drafted = self._priced(typical.shape, min(typical.tokens, model_free.depth + 1.0))
        expected = 1.0 if free is None else free.tokens
        return drafted._replace(estimated=expected, rate_without=without.tokens / without.milliseconds)

    def _with_features(self, features: Features, plain: Decision) -> Decision:
        """Return the best drafted tree for ``features``, or a plain step if that is better."""
        assert self._drafted is not None, "there is nothing to draft"
        tree = self._drafted.best(features, self._here)
        drafted = self._priced(tree.shape, tree.tokens)
        if self._value(drafted) > self._value(plain):
            return drafted
        head_ms = self._costs[self._here].head_ms * self._scales.factors[-1] if self._is_head_first else 0.0
        return plain._replace(milliseconds=plain.milliseconds + head_ms, is_drafting=True)

    def _free_passes(self, here: int) -> PassValues:
        """Return the values of passes with model-free drafts at the present latency."""
        passes = self._model_free[here]
        if self._scaled != here:
            passes.scale(self._scales.factors)
            self._scaled = here
        return passes

    def _drafted_passes(self, here: int, shape: TreeShape) -> PassValues:
        """Return the values of passes that verify a tree drafted as ``shape``."""
        key = here, shape.width, shape.depth
        if key not in self._pruning:
            costs = self._costs[here]
            other_ms = costs.drafting_ms(shape.width, shape.depth) + costs.overhead_ms
            self._pruning[key] = PassValues(costs, other_ms, self._objective)
        return self._pruning[key]

    def _priced(self, shape: TreeShape, tokens: float) -> Decision:
        """Return a drafted tree's decision, with its milliseconds at the present latency scale."""
        milliseconds = self._drafted_passes(self._here, shape).milliseconds[self._index(shape)]
        return Decision(shape, tokens, milliseconds * self._scales.factors[-1], is_drafting=True)

    def _verified_at(self, decision: Decision, expected: Sequence[float], index: int) -> Decision:
        """Return ``decision`` with the verify width at ``index``."""
        shape = decision.shape._replace(verify_width=self._costs[self._here].verify_widths[index])
        priced = self._priced(shape, expected[index])
        return priced._replace(estimated=decision.estimated, rate_without=decision.rate_without)

    def _index(self, shape: TreeShape) -> int:
        return self._costs[self._here].verify_widths.index(shape.verify_width)

    def _value(self, decision: Decision) -> float:
        return objective_value(decision.tokens, decision.milliseconds, self._objective)

    @property
    def _plain_ms(self) -> float:
        return self._costs[self._here].plain_ms * self._scales.factors[0]

    # ==== learning ====

    def begin(self) -> None:
        """Begin a request: limit the acceptance correction, and charge the loss of the last request's first tree."""
        for budget in self._budgets.values():
            budget.begin()
        self._correction.begin()
        self._scaled, self._is_cold, self._drafter_lags = -1, True, True

    def observe(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        """Update latency scales, acceptance correction and regret budgets by one finished iteration.

        Args:
            decision: the iteration's decision.
            tokens: tokens that the iteration added to the text, bonus token included.
            milliseconds: time of the whole iteration.
        """
        shape, kind, plain_ms = decision.shape, decision.kind, self._plain_ms
        # The time includes a prefill of the drafter, or features that only a plain step has used.
        has_read = kind == "drafted" and (self._drafter_lags or not shape.depth)
        charged_ms = milliseconds if has_read else min(milliseconds, LatencyScales.PAUSE * decision.milliseconds)
        for each, budget in self._budgets.items():
            if each == kind:
                budget.add_tree(tokens - charged_ms * max(decision.rate_without, 1.0 / plain_ms))
            else:
                budget.earn()
        self._correct(decision, tokens)
        if not has_read:
            step = -1 if kind == "drafted" else self._index(shape)
            predicted_ms = plain_ms if kind == "plain" else decision.milliseconds
            self._scales.observe(step, predicted_ms, milliseconds, is_cold=self._is_cold)
        self._drafter_lags = kind == "model_free" or (kind == "plain" and self._drafter_lags)
        self._scaled, self._is_cold = -1, False

    def _correct(self, decision: Decision, tokens: int) -> None:
        """Update the acceptance corrections by the ``tokens`` that an iteration gave, bonus token included."""
        if decision.kind == "model_free":
            self._correction.observe(decision.estimated - 1.0, tokens - 1)
        else:
            self._correction.decay()
        if decision.rate_without and decision.shape.depth and self._drafted is not None:
            added = self._drafted.added(self._here) / decision.estimated
            self._added.observe(added, tokens - decision.estimated)
        else:
            self._added.decay()

    def state(self) -> dict[str, Any]:
        """Return latency scales, acceptance corrections and regret budgets as JSON-compatible data for ``restore``."""
        return {
            "scales": self._scales.state(),
            "model_free": self._correction.state(),
            "added": self._added.state(),
            "budgets": {kind: budget.state() for kind, budget in self._budgets.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the online estimates by ``state``, a result of ``state()`` of a policy over the same verify widths.

        Raises:
            ValueError: ``state`` has another number of verify widths.
        """
        self._scales.restore(state["scales"])
        self._correction.restore(state["model_free"])
        if "added" in state:  # not in files of earlier versions
            self._added.restore(state["added"])
        for kind, budget in self._budgets.items():
            budget.restore(state["budgets"][kind])
        self._scaled = -1


class LatencyScales:
    """Factors of the present latency over the measured costs, one for each step: plain, each verify width, drafted.

    Step 0 is plain, step i verifies model-free drafts at the i-th verify width, and the last step is any drafted tree.
    An iteration moves all factors, and the factor of its own step twice as much. So the factors also follow the ratio
    of a wide pass to a plain step: if the memory becomes faster, plain steps gain more than wide passes, whose time is
    spent on arithmetic.
    """

    COMMON_RATE, OWN_RATE = 0.1, 0.1  # shares of a log deviation that move all factors, and the step's factor further
    PAUSE = 1.5  # ratios to the prediction are clipped to 1/PAUSE .. PAUSE: the rest is a pause of the machine
    FARTHEST = 10.0  # the first step sets all factors within 1/FARTHEST .. FARTHEST

    def __init__(self, num_widths: int) -> None:
        self.factors = [1.0] * (num_widths + 1)
        self._is_known = False

    def observe(self, step: int, predicted_ms: float, milliseconds: float, *, is_cold: bool = False) -> None:
        """Update the factors by the time of one iteration.

        The first iteration that is not cold scales all factors by its whole ratio, because the machine may be busy or
        may not be the measured one.

        Args:
            step: index of the factor: 0 is plain, i > 0 model-free drafts at the i-th verify width, -1 a drafted tree.
            predicted_ms: the iteration's predicted time with the present factors.
            milliseconds: the iteration's measured time.
            is_cold: the iteration follows a prefill, which fills the CPU caches; such an iteration can only lower the
                factors.
        """
        ratio = milliseconds / predicted_ms
        if not (self._is_known or is_cold):
            self._is_known = True
            ratio = min(max(ratio, 1.0 / self.FARTHEST), self.FARTHEST)
            self.factors = [factor * ratio for factor in self.factors]
            return
        deviation = log(min(max(ratio, 1.0 / self.PAUSE), 1.0 if is_cold else self.PAUSE))
        common = 1.0 + self.COMMON_RATE * deviation
        self.factors = [factor * common for factor in self.factors]
        self.factors[step] *= 1.0 + self.OWN_RATE * deviation

    def state(self) -> dict[str, Any]:
        """Return {"factors": one factor for each step}, for JSON and ``restore``."""
        return {"factors": list(self.factors)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the factors by ``state``, a result of ``state()``. A new policy's ``observe`` then rescales them.

        Raises:
            ValueError: ``state`` has another number of factors.
        """
        if len(state["factors"]) != len(self.factors):
            raise ValueError(f"factors of {len(state['factors'])} steps, not of {len(self.factors)}")
        self.factors = list(state["factors"])


class AcceptanceCorrection:
    """Correction of expected accepted tokens, kept across requests: a moving ratio of accepted to estimated tokens.

    Scores are products of calibrated probabilities. Such a product assumes that edges are independent and that every
    text is like the calibration's. The ratio has a prior of 4 tokens with a correct estimate.
    """

    def __init__(self) -> None:
        self._estimated = self._accepted = 0.0

    @property
    def factor(self) -> float:
        """Factor on the expected accepted tokens, at least 0; 1 before the first tree."""
        return max(0.0, (self._accepted + PRIOR) / (self._estimated + PRIOR))

    def begin(self) -> None:
        """Begin a request, whose drafts may be accepted less often: limit the factor to 1, its weight to 12 tokens."""
        weight = min(self._estimated + PRIOR, INHERITED)
        self._estimated, self._accepted = weight - PRIOR, weight * min(self.factor, 1.0) - PRIOR
        self.decay()

    def observe(self, estimated: float, accepted: float) -> None:
        """Update the factor by one verified tree. Neither number counts the bonus token.

        Args:
            estimated: predicted number of accepted tokens, such as from the scores of the tree's nodes.
            accepted: number of accepted tokens. For the tokens that drafting adds, it is the number of tokens that the
                iteration gave minus the number expected of model-free drafts alone, which may be negative.
        """
        self._estimated = DECAY * self._estimated + estimated
        self._accepted = DECAY * self._accepted + accepted

    def decay(self) -> None:
        """Move the correction factor towards 1, after an iteration that gives no observation for it."""
        self.observe(0.0, 0.0)

    def state(self) -> dict[str, Any]:
        """Return the moving averages {"estimated": tokens, "accepted": tokens}, for JSON and ``restore``."""
        return {"estimated": self._estimated, "accepted": self._accepted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the moving averages by ``state``, a result of ``state()``."""
        self._estimated, self._accepted = state["estimated"], state["accepted"]


class RegretBudget:
    """Balance of gains and losses of one kind of speculation, in plain steps at the present speed.

    The balance starts at ``GRANT`` and never exceeds it. A negative balance closes the budget, and then no tree of this
    kind is drafted. Each iteration of another kind adds ``EARNED``. The budget reopens at ``REOPENS``, which pays for a
    few trees, because a single tree would be measured with cold caches. The balance is kept across requests.

    The loss of a tree is the number of plain steps that fit in the time of its iteration, minus its tokens. For a
    drafted tree, the tokens that the best decision without the drafter was expected to give in that time take the place
    of the plain steps, if they are more. The policy limits the time to 1.5 times the prediction, since the rest is a
    pause of the machine. A tree is charged at most ``WORST``.

    The loss of a request's first tree includes the drafter's prefill of the prompt, a sunk cost. Charged at once, it
    would stop the speculation that could recover it. So later gains of the request repay this loss, and the rest of it,
    at most three times ``WORST``, is charged when the next request begins.

    Theorem. Whatever trees are drafted and however the speed of the machine changes, from any iteration on

        lost <= GRANT + EARNED * iterations of other kinds + 4 * WORST + the first tree of this request

    where ``lost`` are the losses minus the gains. The iterations may begin anywhere, since earlier gains raise the
    balance to ``GRANT`` at most: a request loses no more because earlier requests gained. Proof: the balance is at most
    GRANT - lost + earned, without this request's first tree, which is charged when the next request begins. Trees are
    drafted only while the balance is not negative, so the last tree lowers it to -WORST at least, and the charge of its
    request's first tree to -4 * WORST.
    """

    GRANT, EARNED = 16.0, 0.01  # initial and highest balance; earned per iteration of another kind
    REOPENS = 2.0  # balance at which a closed budget reopens
    WORST = 4.0  # the most that one tree is charged

    def __init__(self) -> None:
        self._balance, self.is_open = self.GRANT, True
        self._first, self._has_first = 0.0, False  # loss of this request's first tree, charged at the next ``begin``

    def begin(self) -> None:
        """Begin a request, and charge the first tree of the last request to the balance."""
        self._add(self._first)
        self._first, self._has_first = 0.0, False

    def add_tree(self, gained: float) -> None:
        """Add the gain or loss of one verified tree to the balance.

        Args:
            gained: the tree's tokens minus the tokens that decoding without it gives in the same time; negative for a
                loss.
        """
        if not self._has_first:
            self._has_first, self._first, gained = True, max(min(gained, 0.0), -3 * self.WORST), max(gained, 0.0)
        repaid = min(max(gained, 0.0), -self._first)
        self._first += repaid
        self._add(max(gained - repaid, -self.WORST))

    def earn(self) -> None:
        """Raise the balance for an iteration that did not use the budget's kind of speculation."""
        self._add(self.EARNED)

    def _add(self, gained: float) -> None:
        self._balance = min(self._balance + gained, self.GRANT)
        self.is_open = self._balance >= (0.0 if self.is_open else self.REOPENS)

    def state(self) -> dict[str, Any]:
        """Return {"balance": plain steps, "is_open": bool}, for JSON and ``restore``."""
        return {"balance": self._balance, "is_open": self.is_open}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the balance and ``is_open`` to those of ``state``, a result of ``state()``."""
        self._balance, self.is_open = state["balance"], state["is_open"]
