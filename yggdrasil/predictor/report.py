"""Scores of a depth predictor and of two baselines on held-out documents. Imports sklearn lazily.

Dims: n positions, D depth levels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]

Scorer: TypeAlias = Literal["predictor", "constant", "confidence"]
REPORT_VERSION = 2  # of the file of a report
_BINS = 10  # points of a calibration curve, as many positions each


class DocumentSplit(NamedTuple):
    """Three disjoint sets of document numbers. The last two may be empty if there are few documents."""

    training: tuple[int, ...]
    validation: tuple[int, ...]  # early stopping and calibration
    held_out: tuple[int, ...]  # the report


def split_documents(documents: IntArray, seed: int, held_out: float = 0.25, validation: float = 0.2) -> DocumentSplit:
    """Split document numbers at random into training, validation and held-out sets, each ascending.

    Each set gets at least one document if there are enough: first training, then held out, then validation.

    Args:
        documents: document number of each position; repeated numbers count once.
        seed: of the random order.
        held_out: share of the documents in the held-out set.
        validation: share of the remaining documents in the validation set.
    """
    order = np.random.default_rng(seed).permutation(np.unique(documents)).tolist()
    num_held_out = min(max(1, round(held_out * len(order))), max(len(order) - 1, 0))
    rest = order[num_held_out:]
    num_validation = min(max(1, round(validation * len(rest))), max(len(rest) - 1, 0))
    return DocumentSplit(
        training=tuple(sorted(rest[num_validation:])),
        validation=tuple(sorted(rest[:num_validation])),
        held_out=tuple(sorted(order[:num_held_out])),
    )


@dataclass(frozen=True, slots=True)
class DepthScore:
    """Scores of one predictor at one depth on held-out documents; None if undefined, with the reason in ``note``."""

    depth: int
    scorer: Scorer
    auc: float | None  # of the classification length >= depth
    brier: float | None  # mean squared error of P(length >= depth)
    positions: int
    positives: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class CalibrationPoint:
    """One bin of a calibration curve: held-out positions with similar predictions."""

    depth: int
    predicted: float  # mean prediction of the bin
    reached: float  # share whose length >= depth
    positions: int


@dataclass(frozen=True)
class TrainingReport:
    """The data split and held-out scores of a training."""

    split: DocumentSplit
    held_out_positions: int
    epochs: int
    best_epoch: int  # 0: no epoch beat the constant rates on the validation documents
    scores: list[DepthScore]
    calibration: list[CalibrationPoint] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """Return ``scores`` as flat dictionaries, one for each depth and scorer, with the fields of ``DepthScore``."""
        return [asdict(score) for score in self.scores]


@dataclass(frozen=True, eq=False)
class LabelledLengths:
    """Accepted lengths of positions, with the drafted trees' confidence if it was recorded."""

    lengths: IntArray  # [n]
    confidence: FloatArray | None  # [n, D] best-path log-score at each depth, known only after drafting

    def reaches(self, depth: int) -> npt.NDArray[np.bool_]:
        """Return for each position whether its accepted length is at least ``depth``, [n]."""
        return self.lengths >= depth


def score_depths(survival: FloatArray, fitted_on: LabelledLengths, held_out: LabelledLengths) -> list[DepthScore]:
    """Score the depth predictor and two baselines on held-out positions: one score per depth and scorer, by depth.

    The baselines are a constant rate per depth, and the drafted tree's confidence mapped to probabilities by isotonic
    regression. Without recorded confidence there is only the first.

    Args:
        survival: [n, D] the predictor's P(accepted length >= d) at the held-out positions.
        fitted_on: positions to fit the baselines on.
        held_out: accepted lengths at the held-out positions.
    """
    scores: list[DepthScore] = []
    for depth in range(1, survival.shape[1] + 1):
        reached, known = held_out.reaches(depth), fitted_on.reaches(depth)
        column = survival[:, depth - 1]
        constant = np.full(len(reached), known.mean() if len(known) else np.nan)
        scores.append(_score("predictor", depth, reached, column, column))
        scores.append(_score("constant", depth, reached, constant, constant))
        if held_out.confidence is not None and fitted_on.confidence is not None:
            ranking = held_out.confidence[:, depth - 1]
            probability = _isotonic(fitted_on.confidence[:, depth - 1], known, ranking)
            scores.append(_score("confidence", depth, reached, ranking, probability))
    return scores


def calibration_points(survival: FloatArray, held_out: LabelledLengths) -> list[CalibrationPoint]:
    """Return the calibration curve of each depth: up to ten bins of equally many positions, by rising prediction.

    The curves follow one another, depth 1 first. Without positions there are no bins.

    Args:
        survival: [n, D] the predictor's P(accepted length >= d) at the held-out positions.
        held_out: accepted lengths at the same positions.
    """
    points = []
    for depth in range(1, survival.shape[1] + 1):
        reached, column = held_out.reaches(depth), survival[:, depth - 1]
        for part in np.array_split(np.argsort(column, kind="stable"), min(_BINS, len(column)) or 1):
            if len(part):
                points.append(
                    CalibrationPoint(depth, float(column[part].mean()), float(reached[part].mean()), len(part))
                )
    return points


def _score(
    scorer: Scorer, depth: int, reached: npt.NDArray[np.bool_], ranking: FloatArray, probability: FloatArray
) -> DepthScore:
    from sklearn.metrics import roc_auc_score

    positives = int(reached.sum())
    auc, brier, note = None, None, ""
    if not len(reached):
        note = "no held-out positions"
    elif not np.isfinite(probability).all():
        note = "nothing to fit this baseline on"
    else:
        brier = float(np.mean((probability.astype(np.float64) - reached) ** 2))
        if positives in (0, len(reached)):
            note = f"no AUC: every held-out length is {'>=' if positives else '<'} {depth}"
        else:
            auc = float(roc_auc_score(reached, ranking))
    return DepthScore(depth, scorer, auc, brier, len(reached), positives, note)


def _isotonic(known_score: FloatArray, known: npt.NDArray[np.bool_], score: FloatArray) -> FloatArray:
    from sklearn.isotonic import IsotonicRegression

    if not len(known) or not len(score):
        return np.full(len(score), np.nan)
    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    model.fit(known_score.astype(np.float64), known.astype(np.float64))
    return np.asarray(model.predict(score.astype(np.float64)), dtype=np.float64)
