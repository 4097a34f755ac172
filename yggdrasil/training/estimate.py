"""Estimates the speed-up of a drafter in training from step costs in the target's plans on this machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from yggdrasil.artifacts import current_machine, list_plans
from yggdrasil.artifacts.homes import expanded
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.drafters.heads.kinds import kind_of
from yggdrasil.errors import ArtifactError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import objective_value
from yggdrasil.scheduling.plan import DeviceName, Plan, resolve_source
from yggdrasil.training.settings import Kind

_LEVEL = 0.01  # cost of a level, as a share of a pass, if one pass drafts all levels


@dataclass(frozen=True)
class Estimate:
    """Speed-up estimates with the step costs of one plan."""

    plan: str
    costs: StepCosts
    is_estimated: bool  # whether the draft pass's cost is derived from the drafter's size, not measured

    def describe(self, agreement: Sequence[float]) -> str:
        """Return one line with the speed-up over plain decoding that chains of the best length give.

        Args:
            agreement: for each draft step, the share of the head's argmax tokens that equal the target's.
        """
        length, speedup = max(enumerate(self.speedups(agreement)), key=lambda each: each[1])
        chain = f"a chain of {length} drafted token{'s' * (length > 1)}"
        reckoned = " and a draft pass estimated from its size" if self.is_estimated else ""
        costs = f"by the step costs of plan {self.plan}{reckoned}"
        if length == 0:
            return f"this head alone would not speed up decoding ({costs})"
        return f"this head alone would decode {speedup:.2f} times as fast as plain decoding, with {chain} ({costs})"

    def speedups(self, agreement: Sequence[float]) -> list[float]:
        """Return the factors over plain decoding that chains give, by the number of drafted tokens from 0 on.

        Args:
            agreement: for each draft step, the share of the head's argmax tokens that equal the target's. A token is
                accepted if all tokens up to it agree.
        """
        costs = self.costs
        kept = accumulate(accumulate(agreement, mul), initial=1.0)
        return [
            objective_value(tokens, costs.iteration_ms(1, length, self._width(length + 1))) * costs.plain_ms
            for length, tokens in zip(range(costs.verify_widths[-1]), kept, strict=False)
        ]

    def _width(self, rows: int) -> int:
        return min((width for width in self.costs.verify_widths if width >= rows), key=self.costs.verify_ms.__getitem__)


def estimate_from_plans(
    fingerprint: str, weights: Weights, device: DeviceName, share: float, kind: Kind = "eagle3"
) -> Estimate | None:
    """Return an estimator of a head's speed-up, with the step costs of one of the target's plans.

    Of the target's plans on this machine, plans with ``weights`` are preferred, then plans with a head of ``kind``,
    then newer plans. The result is None if the target has no plan.

    Args:
        fingerprint: fingerprint of the target's checkpoint.
        weights: the target's weight format.
        device: device of the plan; plans for other devices do not count.
        share: bytes that a drafter pass reads divided by bytes that a target pass reads; gives the cost of a draft pass
            if the plan has not measured a head of ``kind``.
        kind: kind of the head.
    """
    plans = sorted(
        _plans_of(fingerprint, device), key=lambda plan: (plan.target.weights == weights, _kind(plan) == kind)
    )
    if not plans:
        return None
    plan = plans[-1]
    costs, measured = plan.costs[0].steps(), _kind(plan) == kind
    if not measured:
        pass_ms = share * costs.verify_ms[1]
        level_ms = pass_ms if kind == "eagle3" else _LEVEL * pass_ms
        free_ms = costs.overhead_ms if costs.model_free_overhead_ms is None else costs.model_free_overhead_ms
        costs = replace(
            costs, head_ms=pass_ms, draft_ms={1: level_ms}, overhead_ms=free_ms, model_free_overhead_ms=None
        )
    return Estimate(plan.name, costs, is_estimated=not measured)


def _plans_of(fingerprint: str, device: DeviceName) -> Iterator[Plan]:
    """Yield this machine's plans of a target on ``device``, oldest file first; damaged files are skipped."""
    machine = current_machine()
    entries = [entry for entry in list_plans() if entry.fits(machine)]
    for entry in sorted(entries, key=lambda each: each.path.stat().st_mtime):
        try:
            plan = Plan.load(entry.path)
        except ArtifactError:
            continue
        if (plan.target.fingerprint, plan.device) == (fingerprint, device):
            yield plan


def _kind(plan: Plan) -> str | None:
    """Return the kind of a plan's head; None if no head drafts chains (width 1) or its folder is gone."""
    if plan.drafter is None or 1 not in plan.shapes.draft_widths:
        return None
    return kind_of(expanded(resolve_source(plan.drafter.source)))
