"""Policies for comparisons only."""

from collections.abc import Sequence
from dataclasses import replace

from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.engine.planned import planned_policy
from yggdrasil.engine.policy import Decision, Learner, Policy
from yggdrasil.predictor.bundle import Learned
from yggdrasil.predictor.evidence import Evidence
from yggdrasil.scheduling.plan import Plan
from yggdrasil.scheduling.stages import is_head_first
from yggdrasil.tree.objective import choose_verify_width
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.stakes import NO_STAKES, Stakes
from yggdrasil.tree.step_costs import StepCosts
from yggdrasil.tree.widths import fitting_or_widest


class PrunedPolicy:
    """One width and depth for every iteration; the verify width by the objective, once the tree is drafted."""

    learner: Learner | None = None

    def __init__(self, shape: TreeShape, costs: StepCosts) -> None:
        self._decision, self._costs = Decision(shape), costs

    def rest(self, context: int) -> Decision | None:
        return None

    def choose(self, evidence: Evidence) -> Decision:
        return self._decision

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        drafting_ms = self._costs.drafting_ms(shape.width, shape.depth)
        return Decision(shape._replace(verify_width=choose_verify_width(expected, drafting_ms, self._costs)))


class UnprunedPolicy(ObjectivePolicy):
    """The plan's policy, but all that was drafted is verified."""

    def stakes_beside(self, shape: TreeShape, context: int) -> Stakes:
        return NO_STAKES

    def _best_width(self, shape: TreeShape, expected: Sequence[float], place: int) -> int:
        widths = self._costs[place].verify_widths
        return widths.index(fitting_or_widest(widths, 1 + shape.width * shape.depth))


def plan_ablations(plan: Plan, learned: Learned) -> dict[str, Policy]:
    """The plan's policy with one of its decisions left out, or its depth from the other source.

    With the draft model only, nothing else guesses.

    A predictor that reads the drafter's first guesses is left out where the schedule chooses the depth before them.
    """
    widest = max(learned.ratios)
    found: dict[str, Policy] = {
        "by plan, draft model only": planned_policy(plan, learned, wants_free=False),
        "by plan, one draft width": planned_policy(plan, replace(learned, ratios={widest: learned.ratios[widest]})),
        "by plan, unpruned": planned_policy(plan, learned, UnprunedPolicy),
    }
    if plan.depth_from != "mean":
        found["by plan, mean depth"] = planned_policy(replace(plan, depth_from="mean"), learned)
    elif is_head_first(plan.stages) or not learned.reads.head:
        found["by plan, predicted depth"] = planned_policy(replace(plan, depth_from="predictor"), learned)
    return found
