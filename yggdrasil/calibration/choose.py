"""From measurements and traces to what the runtime uses: what was learned, and the policy that wins in simulation."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from yggdrasil.calibration.replay import replay
from yggdrasil.engine.drafted_trees import DepthEvidence
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.bundle import Learned
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.evidence import EvidenceSizes
from yggdrasil.predictor.report import TrainingReport
from yggdrasil.predictor.training import train_depth_predictor
from yggdrasil.profiling.simulator import FixedPolicy, OutcomeCache, PredictedPolicy, SimulationResult, simulate
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.scheduling.plan import DepthSource, Expectation
from yggdrasil.tree.objective import ShapeChooser, StepCosts

CONTEXT = 0  # the simulation knows one context length
MEAN: DepthSource = "mean"
WORTH_READING = 0.98  # of the time a token: a predictor takes time itself, which the simulation does not see


class Choice(NamedTuple):
    """The learned tables, the depth source that wins, and what every candidate gave on held-out documents."""

    learned: Learned | None
    reports: dict[DepthSource, TrainingReport]  # of every predictor that was trained
    depth_from: DepthSource
    predicted: Expectation
    rejected: list[Expectation]

    @classmethod
    def without_drafter(cls, expected: Sequence[Expectation]) -> "Choice":
        """Nothing has a depth to predict; the first of ``expected`` is what the policy gives."""
        return cls(None, {}, MEAN, expected[0], list(expected[1:]))


def fit_acceptance(traces: TraceSet) -> AcceptanceCalibration:
    """Monotone map from the drafter's probability to acceptance, over the edges of every width's trees."""
    pairs = [traces.edges(width) for width in traces.widths]
    return AcceptanceCalibration.fit(np.concatenate([p for p, _ in pairs]), np.concatenate([hit for _, hit in pairs]))


def choose(traces: TraceSet, acceptance: AcceptanceCalibration, costs: StepCosts) -> Choice:
    """Train on some documents, decide on the others. ``traces`` were grown with ``acceptance`` already."""
    reference = traces.widths[-1]
    whole = traces.max_depth * reference + 1
    trained = {source: _train(traces, reference, sizes) for source, sizes in _readings(traces).items()}
    split = next(iter(trained.values()))[1].split
    known = traces.select([*split.training, *split.validation])
    held_out = traces.select(split.held_out) if split.held_out else known
    ratios = {w: t.astype(np.float32) for w, t in known.ratio_tables(costs.verify_widths, reference).items()}
    mean_survival = known.survival_table(reference, whole).astype(np.float32)

    cache = OutcomeCache(held_out, costs.verify_widths)
    results: dict[DepthSource, SimulationResult] = {}
    for source in (MEAN, *trained):
        depth = DepthEvidence(trained[source][0], _readings(traces)[source]) if source in trained else None
        is_head_first = source == "head"
        policy = ObjectivePolicy({CONTEXT: costs}, ratios, mean_survival, depth, is_head_first=is_head_first)
        results[source] = replay(held_out, policy, costs, CONTEXT, cache, is_head_first=is_head_first)
    best = min(results, key=lambda source: results[source].ms_per_token)
    if results[best].ms_per_token > WORTH_READING * results[MEAN].ms_per_token:
        best = MEAN
    kept: DepthSource = best if best in trained else "predictor"  # the file holds one, used or not
    learned = Learned(acceptance, trained[kept][0], _readings(traces)[kept], mean_survival, ratios)
    expectations = {s: _expectation(f"depth from {s}", result, costs.plain_ms) for s, result in results.items()}
    lengths = held_out.accepted_length(reference, traces.max_depth, whole)
    oracle = PredictedPolicy(_certain(lengths, traces.max_depth), ShapeChooser(costs, ratios))
    known_lengths = simulate(held_out, oracle, costs, cache)
    rejected = [
        *(expectation for source, expectation in expectations.items() if source != best),
        _best_fixed(held_out, traces.widths, costs, cache),
        _expectation("accepted lengths known beforehand", known_lengths, costs.plain_ms),
        Expectation("plain decoding", 1.0, costs.plain_ms, 1.0),
    ]
    reports = {source: report for source, (_, report) in trained.items()}
    return Choice(learned, reports, best, expectations[best], rejected)


def _readings(traces: TraceSet) -> dict[DepthSource, EvidenceSizes]:
    """What each kind of predictor reads; the head's only where a head draft says something."""
    hidden, repetition, head = (traces.hidden.shape[1], traces.repetition.shape[1], traces.head.shape[1])
    readings: dict[DepthSource, EvidenceSizes] = {"predictor": EvidenceSizes(hidden, repetition, 0)}
    if traces.has_head:
        readings["head"] = EvidenceSizes(hidden, repetition, head)
    return readings


def _train(traces: TraceSet, reference: int, sizes: EvidenceSizes) -> tuple[DepthPredictor, TrainingReport]:
    """On the accepted lengths of the whole tree of the reference width."""
    whole = traces.max_depth * reference + 1
    return train_depth_predictor(
        traces.evidence(sizes),
        traces.accepted_length(reference, traces.max_depth, whole),
        traces.document,
        traces.max_depth,
        confidence=traces.best_path_scores(reference),
        sizes=sizes,
    )


def _certain(lengths: npt.NDArray[np.int64], max_depth: int) -> npt.NDArray[np.float64]:
    """Survival of a length that is known, [P, D]."""
    return (lengths[:, None] >= np.arange(1, max_depth + 1)).astype(np.float64)


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
