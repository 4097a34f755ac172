"""Policies for comparisons and ablations."""

from collections.abc import Sequence
from dataclasses import replace

from yggdrasil.engine.plan_parts import planned_policy
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import FixedPolicy, Policy
from yggdrasil.policy.objective import Decision, PassValues
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.predictor.bundle import Learned
from yggdrasil.runtime.passes import fitting_or_widest
from yggdrasil.scheduling.plan import Plan
from yggdrasil.scheduling.stages import is_head_first
from yggdrasil.tree.shape import TreeShape


class PrunedPolicy(FixedPolicy):
    """Policy that drafts one shape and chooses the verify width by the objective after drafting."""

    def __init__(self, costs: StepCosts, shape: TreeShape) -> None:
        super().__init__(shape)
        self._costs = costs

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        shape, costs = decision.shape, self._costs
        passes = PassValues(costs, costs.drafting_ms(shape.width, shape.depth) + costs.overhead_ms)
        verify_width = costs.verify_widths[passes.best(expected)[0]]
        return decision._replace(shape=shape._replace(verify_width=verify_width))


class UnprunedPolicy(ObjectivePolicy):
    """The plan's policy without pruning: every drafted node is verified."""

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        widths = self._costs[self._here].verify_widths
        widest = fitting_or_widest(widths, 1 + decision.shape.width * decision.shape.depth)
        return self._verified_at(decision, expected, widths.index(widest))


def plan_ablations(plan: Plan, learned: Learned) -> dict[str, Policy]:
    """Return ablations of the plan's policy: without model-free drafts, one draft width, unpruned, other depth source.

    A depth predictor that reads the drafter's first level is left out if the schedule chooses the depth before it.
    """
    widest = max(learned.ratios)
    found: dict[str, Policy] = {
        "by plan, draft model only": planned_policy(plan, learned, wants_model_free=False),
        "by plan, one draft width": planned_policy(plan, replace(learned, ratios={widest: learned.ratios[widest]})),
        "by plan, unpruned": planned_policy(plan, learned, UnprunedPolicy),
    }
    if plan.depth_from != "mean":
        found["by plan, mean depth"] = planned_policy(replace(plan, depth_from="mean"), learned)
    elif is_head_first(plan.stages) or not learned.reads.head:
        found["by plan, predicted depth"] = planned_policy(replace(plan, depth_from="predictor"), learned)
    return found
