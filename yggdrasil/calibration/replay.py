"""Play the run-time policy itself, budgets and all, over recorded traces: what decoding would do, at the plan's costs.

Dims: P positions, F features, V verify widths.
"""

from __future__ import annotations

from collections.abc import Sequence

from yggdrasil.engine.policy import Decision, Policy
from yggdrasil.engine.promises import KeptPromises
from yggdrasil.predictor.evidence import Float32Array
from yggdrasil.profiling.simulator import OutcomeCache, ShapeTally, SimulationResult
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.tree.objective import StepCosts


class RecordedEvidence:
    """The evidence of one recorded position."""

    def __init__(self, traces: TraceSet, index: int, context: int) -> None:
        self._traces, self._index = traces, index
        self.context = context

    def hidden(self) -> Float32Array:
        row: Float32Array = self._traces.hidden[self._index]
        return row

    def repetition(self) -> Float32Array:
        row: Float32Array = self._traces.repetition[self._index]
        return row

    def head(self) -> Float32Array:
        row: Float32Array = self._traces.head[self._index]
        return row


def replay(
    traces: TraceSet, policy: Policy, costs: StepCosts, context: int, cache: OutcomeCache, *, is_head_first: bool
) -> SimulationResult:
    """Decode every document as the engine would with ``policy``, each a request of its own; greedy acceptance.

    Everything is charged that decoding pays: plain steps that sample their price, a head draft before a
    refusal, a tree that is verified with width 1. Nothing else guesses: trees of the draft model are to be
    compared, and the counts, which go on with any of them, are not recorded. ``context`` names the plan's costs that
    ``costs`` are.
    """
    tally, promises = ShapeTally(), KeptPromises()
    for start, stop in traces.document_ranges():
        if policy.learner is not None:
            policy.learner.begin()
        index = start
        while index < stop:
            rested = policy.rest(context)
            decision, accepted = (
                _tree(traces, index, policy, context, cache, promises) if rested is None else (rested, 0)
            )
            shape = decision.shape
            spent_head = is_head_first and rested is None and not shape.depth
            milliseconds = costs.iteration_ms(*shape) + (costs.head_ms if spent_head else 0.0)
            if policy.learner is not None:
                policy.learner.settle(decision, accepted + 1, milliseconds, rested=rested is not None)
            tally.add(shape, accepted, milliseconds)
            index += accepted + 1
    return tally.result(traces.num_positions)


def _tree(
    traces: TraceSet, index: int, policy: Policy, context: int, cache: OutcomeCache, promises: KeptPromises
) -> tuple[Decision, int]:
    """What is verified at row ``index``, and how many drafted tokens it gives."""
    decision = policy.choose(RecordedEvidence(traces, index, context))
    shape = decision.shape
    if not shape.depth:
        return decision, 0
    outcomes = cache.get(shape.width, shape.depth)
    by_scores: Sequence[float] = outcomes.expected_tokens[index].tolist()
    decision = policy.prune(shape, promises.honest(by_scores), context)
    verify_width = decision.shape.verify_width
    column = cache.verify_widths.index(verify_width)
    accepted = int(outcomes.accepted[index, column])
    if verify_width > 1:
        promises.observe(max(by_scores[column] - 1.0, 0.0), accepted)
    return decision, accepted
