"""From measurements and traces to what the runtime uses: what was learned, and the policy that wins in simulation."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.bundle import Learned
from yggdrasil.predictor.report import TrainingReport
from yggdrasil.predictor.training import train_depth_predictor
from yggdrasil.profiling.simulator import FixedPolicy, OutcomeCache, PredictedPolicy, SimulationResult, simulate
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.scheduling.plan import DepthSource, Expectation
from yggdrasil.tree.objective import ShapeChooser, StepCosts


class Choice(NamedTuple):
    """The learned tables, the depth source that wins, and what every candidate gave on held-out documents."""

    learned: Learned
    report: TrainingReport
    depth_from: DepthSource
    predicted: Expectation
    rejected: list[Expectation]


def fit_acceptance(traces: TraceSet) -> AcceptanceCalibration:
    """Monotone map from the drafter's probability to acceptance, over the edges of every width's trees."""
    pairs = [traces.edges(width) for width in traces.widths]
    return AcceptanceCalibration.fit(np.concatenate([p for p, _ in pairs]), np.concatenate([hit for _, hit in pairs]))


def choose(traces: TraceSet, acceptance: AcceptanceCalibration, costs: StepCosts, max_verify_width: int) -> Choice:
    """Train on some documents, decide on the others. ``traces`` were grown with ``acceptance`` already."""
    reference = traces.widths[-1]
    whole = traces.max_depth * reference + 1
    lengths = traces.accepted_length(reference, traces.max_depth, whole)
    depth, report = train_depth_predictor(
        traces.hidden, lengths, traces.document, traces.max_depth, confidence=traces.best_path_scores(reference)
    )
    known = traces.select([*report.split.training, *report.split.validation])
    held_out = traces.select(report.split.held_out) if report.split.held_out else known
    ratios = known.ratio_tables(costs.verify_widths, reference)
    mean_survival = known.survival_table(reference, whole).astype(np.float32)
    learned = Learned(acceptance, depth, mean_survival, {w: table.astype(np.float32) for w, table in ratios.items()})
    chooser = ShapeChooser(costs, ratios)

    cache = OutcomeCache(held_out, costs.verify_widths)
    mean = np.broadcast_to(mean_survival, (held_out.num_positions, traces.max_depth))
    adaptive: list[tuple[DepthSource, SimulationResult]] = [
        ("predictor", simulate(held_out, PredictedPolicy.from_predictor(depth, held_out, chooser), costs, cache)),
        ("mean", simulate(held_out, PredictedPolicy(mean, chooser), costs, cache)),
    ]
    plain_ms = costs.plain_ms
    expectations = [_expectation(f"depth from {source}", result, plain_ms) for source, result in adaptive]
    best = int(np.argmin([result.ms_per_token for _, result in adaptive]))
    fixed = _best_fixed(held_out, traces.widths, costs, cache)
    rejected = [expectations[1 - best], fixed, Expectation("plain decoding", 1.0, plain_ms, 1.0)]
    return Choice(learned, report, adaptive[best][0], expectations[best], rejected)


def _best_fixed(traces: TraceSet, widths: Sequence[int], costs: StepCosts, cache: OutcomeCache) -> Expectation:
    """The best single (width, depth) with verification chosen a tree, picked on the same documents: a strong rival."""
    results = [
        (simulate(traces, FixedPolicy(width, depth), costs, cache), width, depth)
        for width in widths
        for depth in range(1, traces.max_depth + 1)
    ]
    result, width, depth = min(results, key=lambda item: item[0].ms_per_token)
    return _expectation(f"fixed width {width} depth {depth}", result, costs.plain_ms)


def _expectation(policy: str, result: SimulationResult, plain_ms: float) -> Expectation:
    return Expectation(
        policy, round(result.aal, 3), round(result.ms_per_token, 4), round(plain_ms / result.ms_per_token, 3)
    )
