"""Fits acceptance calibration and depth predictor on traces, and chooses by simulation how to predict the draft depth.

A depth source is the mean acceptance ("mean"), a depth predictor ("predictor"), or a depth predictor that also reads
the head draft's candidates ("head").
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from yggdrasil.calibration.replay import RecordedTrees, recorded_documents, replay
from yggdrasil.calibration.statistics.prediction import expectation_of, policy_without_drafter
from yggdrasil.calibration.survival import survival_of
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import DepthPrediction
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.bundle import Learned
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.features import FeatureSizes
from yggdrasil.predictor.repetition import repeated_share
from yggdrasil.predictor.training import DocumentSplit, train_depth_predictor
from yggdrasil.profiling.tally import Totals
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.scheduling.plan import DepthSource, Expectation

CONTEXT = 0  # key of the costs in a simulation, which uses the costs of one context length
MEAN: DepthSource = "mean"
MAX_TIME_WITH_PREDICTOR = 0.98  # share of the time per token without it: a simulation omits the predictor's time
MAX_TIME_WITH_DRAFTER = 0.97  # share of the time per token without it: it gains less on more repetitive text


class Gain(NamedTuple):
    """Expected speed with the drafter and without it, over all documents.

    ``error`` is the standard error of the ratio of the decoding time with the drafter to the time without it.
    """

    drafting: Expectation
    without: Expectation
    error: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether decoding with the drafter takes less time than without by more than 3 % plus one standard error."""
        return self.drafting.tpot_ms < (MAX_TIME_WITH_DRAFTER - self.error) * self.without.tpot_ms


class Choice(NamedTuple):
    """The fitted tables of a calibration, the chosen depth source, and the simulated speeds of all candidates.

    Speeds are AAL, milliseconds per token and speed-up over plain decoding, on held-out documents.
    """

    learned: Learned | None  # acceptance calibration, depth predictor and survival tables; None without a drafter
    depth_from: DepthSource
    predicted: Expectation  # speed with the chosen source
    rejected: list[Expectation]  # speeds with the other sources, model-free drafters alone, and plain decoding
    gain: Gain | None = None  # None without model-free drafters

    @classmethod
    def without_drafter(cls, expected: Sequence[Expectation]) -> "Choice":
        """Return the choice for a plan without a draft model or head.

        Args:
            expected: simulated speeds of the chosen policy and then of the rejected policies; at least one.
        """
        return cls(None, MEAN, expected[0], list(expected[1:]))


def fit_acceptance(traces: TraceSet) -> AcceptanceCalibration:
    """Fit the map from a drafter's probability to the share of accepted tokens, on the edges of all recorded trees."""
    pairs = [traces.edges(width) for width in traces.widths]
    return AcceptanceCalibration.fit(np.concatenate([p for p, _ in pairs]), np.concatenate([hit for _, hit in pairs]))


class _PolicyReplays:
    """Simulates policies on the same recorded text."""

    def __init__(
        self, traces: TraceSet, costs: StepCosts, model_free: DrafterGroup | None, prompts: Mapping[int, Sequence[int]]
    ) -> None:
        self.traces, self.costs, self.model_free = traces, costs, model_free
        self.documents = recorded_documents(traces, prompts)
        self._trees = RecordedTrees(traces, costs, model_free)

    def by(self, policy: ObjectivePolicy, source: DepthSource = MEAN) -> Totals:
        """Simulate decoding of the recorded documents with ``policy``, and return tokens, iterations and milliseconds.

        Args:
            source: how the policy predicts the draft depth.

        Raises:
            ValueError: the documents have no text to decode.
        """
        return replay(
            self.documents, policy, costs=self.costs, trees=self._trees, model_free=self.model_free, context=CONTEXT,
            is_head_first=source == "head",
        )  # fmt: skip


def choose(
    traces: TraceSet,
    acceptance: AcceptanceCalibration,
    costs: StepCosts,
    model_free: DrafterGroup | None = None,
    prompts: Mapping[int, Sequence[int]] | None = None,
) -> Choice:
    """Train depth predictors on 3/4 of the documents, and choose the depth source that decodes the rest fastest.

    The mean acceptance stays the depth source unless a predictor takes at least 2 % less time per token.

    Args:
        traces: trees that the drafter drafted on the target's text, with scores calibrated by ``acceptance``.
        acceptance: the acceptance calibration, which becomes part of the result.
        costs: measured step costs, in milliseconds.
        model_free: model-free drafters, which extend the trees; None without them.
        prompts: document number -> token ids of its prompt, which the model-free drafters read.

    Returns:
        The depth source with its simulated speed, the speeds of the rejected candidates, and the fitted acceptance
            calibration, depth predictor and survival tables.
    """
    prompts = prompts or {}
    trained = {source: _train(traces, traces.widths[-1], sizes) for source, sizes in _readings(traces).items()}
    split = next(iter(trained.values()))[1]
    known = traces.select([*split.training, *split.validation])
    held_out = traces.select(split.held_out) if split.held_out else known
    survival = survival_of(known, costs, model_free, prompts)
    ratios = {width: table.astype(np.float32) for width, table in survival.ratios.items()}
    mean_survival = survival.mean.astype(np.float32)

    def policy(source: DepthSource) -> ObjectivePolicy:
        depth = DepthPrediction(trained[source][0], _readings(traces)[source]) if source in trained else None
        return ObjectivePolicy(
            {CONTEXT: costs},
            ratios,
            mean_survival,
            depth,
            is_head_first=source == "head",
            added_tokens=survival.added_tokens,
        )

    played = _PolicyReplays(held_out, costs, model_free, prompts)
    results: dict[DepthSource, Totals] = {source: played.by(policy(source), source) for source in (MEAN, *trained)}
    best = _fastest(results)
    kept: DepthSource = best if best in trained else "predictor"  # the file always holds one predictor
    learned = Learned(
        acceptance, trained[kept][0], _readings(traces)[kept], mean_survival, ratios, survival.added_tokens
    )
    expectations = {s: expectation_of(f"depth from {s}", result, costs) for s, result in results.items()}
    rejected = [
        *(each for source, each in expectations.items() if source != best),
        *([] if model_free is None else [_without_drafter(played)[0]]),
        Expectation("plain decoding", 1.0, costs.plain_ms, 1.0),
    ]
    gain = None if model_free is None else _gain(_PolicyReplays(traces, costs, model_free, prompts), policy(best), best)
    predicted = replace(expectations[best], repeats=round(repeated_share(played.documents), 3))
    return Choice(learned, best, predicted, rejected, gain)


def _fastest(results: Mapping[DepthSource, Totals]) -> DepthSource:
    """Return the fastest source if it takes at least 2 % less time per token than "mean", else "mean"."""
    best = min(results, key=lambda source: results[source].ms_per_token)
    return best if results[best].ms_per_token <= MAX_TIME_WITH_PREDICTOR * results[MEAN].ms_per_token else MEAN


def _without_drafter(played: _PolicyReplays) -> tuple[Expectation, Totals]:
    """Return the expected speed of the model-free drafters alone, and the totals of their simulation."""
    assert played.model_free is not None
    totals = played.by(policy_without_drafter(played.costs))
    return expectation_of(f"{played.model_free.name} alone", totals, played.costs), totals


def _gain(played: _PolicyReplays, policy: ObjectivePolicy, source: DepthSource) -> Gain:
    """Return the expected speeds with the drafter and with model-free drafters alone, over all documents."""
    drafting, (expected, without) = played.by(policy, source), _without_drafter(played)
    error = _error_of_ratio(drafting.document_ms, without.document_ms)
    return Gain(expectation_of(f"depth from {source}", drafting, played.costs), expected, error)


def _error_of_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the standard error of sum(``over``) / sum(``under``), with one value per document each."""
    if len(over) < 2:
        return 0.0
    a, b = np.array(over), np.array(under)
    return float(np.std(a - a.sum() / b.sum() * b, ddof=1) * len(a) ** 0.5 / b.sum())


def _readings(traces: TraceSet) -> dict[DepthSource, FeatureSizes]:
    """Return the feature sizes of each predictor; "head" only if the drafter's head draft gives log-probabilities."""
    hidden, repetition, head = (traces.hidden.shape[1], traces.repetition.shape[1], traces.head.shape[1])
    readings: dict[DepthSource, FeatureSizes] = {"predictor": FeatureSizes(hidden, repetition, 0)}
    if traces.has_head:
        readings["head"] = FeatureSizes(hidden, repetition, head)
    return readings


def _train(traces: TraceSet, reference: int, sizes: FeatureSizes) -> tuple[DepthPredictor, DocumentSplit]:
    """Train a predictor of the accepted length of whole trees of width ``reference``; return it with the split."""
    return train_depth_predictor(
        traces.features(sizes),
        traces.accepted_length(reference),
        traces.document,
        traces.max_depth,
        sizes=sizes,
    )
