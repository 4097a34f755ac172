"""Training: it learns a signal, beats the baselines, leaks nothing, and survives tiny data."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from yggdrasil.predictor.platt import fit_platt
from yggdrasil.predictor.report import LabelledLengths, calibration_points, score_depths, split_documents
from yggdrasil.predictor.training import train_depth_predictor

MAX_DEPTH = 4


class Data(NamedTuple):
    hidden: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float64]
    truth: npt.NDArray[np.float64]  # P(length >= d)


def synthetic(num_documents: int, positions: int, seed: int = 0) -> Data:
    """Return lengths whose rate depends on |hidden[0]|, so no linear model sees it; confidence knows half of it."""
    random = np.random.default_rng(seed)
    num_rows = num_documents * positions
    hidden = random.normal(3.0, 2.0, size=(num_rows, 16)).astype(np.float32)
    signal = np.abs(hidden[:, 0] - 3.0) / 2.0
    rate = 1.0 / (1.0 + np.exp(-(3.0 * signal - 2.0)))
    alive = np.cumprod(random.uniform(size=(num_rows, MAX_DEPTH)) < rate[:, None], axis=1)
    depths = np.arange(1, MAX_DEPTH + 1)
    confidence = depths * (np.log(rate) + random.normal(0.0, 0.7, size=num_rows))[:, None]
    documents = np.repeat(np.arange(num_documents) * 7 + 3, positions)
    return Data(hidden, alive.sum(axis=1), documents, confidence, rate[:, None] ** depths)


@pytest.fixture(scope="module")
def data() -> Data:
    return synthetic(num_documents=40, positions=75)


def test_predictor_learns_the_signal_and_beats_both_baselines(data: Data) -> None:
    predictor, report = train_depth_predictor(
        data.hidden, data.lengths, data.documents, MAX_DEPTH, seed=1, confidence=data.confidence
    )

    table = pd.DataFrame(report.rows()).pivot_table(index="depth", columns="scorer", values=["auc", "brier"])
    assert (table["auc", "predictor"] > table["auc", "confidence"]).all()
    assert (table["auc", "constant"] == 0.5).all()
    assert (table["brier", "predictor"] < table["brier", "confidence"]).all()
    assert (table["brier", "confidence"] < table["brier", "constant"]).all()
    survival = predictor.survival(data.hidden)
    assert (np.diff(survival, axis=1) <= 0).all()
    assert np.abs(survival - data.truth).mean() < 0.08
    assert survival.mean(axis=0) == pytest.approx(data.truth.mean(axis=0), abs=0.04)  # calibrated on the whole
    assert report.best_epoch >= 1


def test_held_out_documents_cannot_influence_the_predictor() -> None:
    data = synthetic(num_documents=12, positions=60)
    predictor, report = train_depth_predictor(data.hidden, data.lengths, data.documents, MAX_DEPTH)
    held_out = np.isin(data.documents, report.split.held_out)
    assert held_out.sum() == report.held_out_positions == 180

    hidden, lengths = data.hidden.copy(), data.lengths.copy()
    hidden[held_out] *= -5.0
    lengths[held_out] = 0
    again, _ = train_depth_predictor(hidden, lengths, data.documents, MAX_DEPTH)

    for name, weight in predictor.to_arrays().items():
        assert (weight == again.to_arrays()[name]).all(), name
    assert report.best_epoch > 0
    lengths[~held_out] = 0  # the same comparison does see a change of the training documents
    other, _ = train_depth_predictor(hidden, lengths, data.documents, MAX_DEPTH)
    assert (predictor.head_bias != other.head_bias).any()


@pytest.mark.parametrize("num_documents", [1, 2, 3, 4, 5, 40])
def test_split_is_by_document_and_complete(num_documents: int) -> None:
    documents = np.random.default_rng(0).integers(0, num_documents, size=400)
    documents[:num_documents] = np.arange(num_documents)

    split = split_documents(documents, seed=3)

    assert sorted(split.training + split.validation + split.held_out) == list(range(num_documents))
    assert len(split.training) >= 1
    assert len(split.held_out) == (0 if num_documents == 1 else max(1, round(num_documents / 4)))
    assert bool(split.validation) == (num_documents >= 3)
    assert split == split_documents(documents[::-1], seed=3)
    if num_documents == 40:
        assert split != split_documents(documents, seed=4)


@pytest.mark.parametrize("num_documents", [1, 2, 3])
@pytest.mark.parametrize("positions", [1, 5])
@pytest.mark.parametrize("lengths", ["mixed", "none", "all"])
def test_tiny_data_trains(num_documents: int, positions: int, lengths: str) -> None:
    data = synthetic(num_documents, positions)
    values = data.lengths if lengths == "mixed" else np.full_like(data.lengths, MAX_DEPTH if lengths == "all" else 0)

    predictor, report = train_depth_predictor(
        data.hidden, values, data.documents, MAX_DEPTH, confidence=data.confidence
    )

    survival = predictor.survival(data.hidden)
    assert np.isfinite(survival).all()
    assert (np.diff(survival, axis=1) <= 0).all()
    assert len(report.rows()) == 3 * MAX_DEPTH
    assert {point.depth for point in report.calibration} == (
        set(range(1, MAX_DEPTH + 1)) if num_documents > 1 else set()
    )
    if lengths != "mixed":
        assert all(row["auc"] is None and row["note"] for row in report.rows())
        assert (survival[:, 0] > 0.5).all() == (lengths == "all")
    if num_documents == 1:
        assert all(row["brier"] is None for row in report.rows())


def test_baseline_scores_by_hand() -> None:
    known = LabelledLengths(np.array([0, 1, 1, 1]), None)
    held_out = LabelledLengths(np.array([0, 1]), None)

    predicted, constant = score_depths(np.array([[0.2], [0.6]]), known, held_out)

    assert (predicted.scorer, predicted.auc) == ("predictor", 1.0)
    assert predicted.brier == pytest.approx((0.04 + 0.16) / 2)
    assert (constant.scorer, constant.auc) == ("constant", 0.5)
    assert constant.brier == pytest.approx((0.5625 + 0.0625) / 2)
    assert (predicted.positions, predicted.positives) == (2, 1)


def test_calibration_points_by_hand() -> None:
    survival = np.linspace(0.0, 0.95, 20)[::-1, None]
    held_out = LabelledLengths((np.arange(20) < 8).astype(np.int64), None)

    points = calibration_points(survival, held_out)

    assert [point.positions for point in points] == [2] * 10
    assert [point.predicted for point in points] == pytest.approx([0.025 + 0.1 * i for i in range(10)])
    assert [point.reached for point in points] == [0.0] * 6 + [1.0] * 4
    assert calibration_points(survival[:0], LabelledLengths(np.zeros(0, dtype=np.int64), None)) == []


def test_platt_undoes_a_known_distortion() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=20_000)
    reached = random.uniform(size=20_000) < 1.0 / (1.0 + np.exp(-logits))

    slope, shift = fit_platt((logits + 1.0) * 3.0, reached)

    assert slope == pytest.approx(1 / 3, abs=0.03)
    assert shift == pytest.approx(-1.0, abs=0.06)
    assert fit_platt(-logits, reached)[0] == 0.0, "a head that ranks backwards is flattened, never turned round"


def test_training_leaves_the_global_random_state_alone() -> None:
    import torch

    data = synthetic(num_documents=3, positions=5)
    before = torch.random.get_rng_state()
    train_depth_predictor(data.hidden, data.lengths, data.documents, MAX_DEPTH)
    assert (torch.random.get_rng_state() == before).all()


def test_shapes_that_do_not_agree_are_all_named() -> None:
    data = synthetic(num_documents=3, positions=5)
    with pytest.raises(ValueError, match="lengths must be integers") as caught:
        train_depth_predictor(data.hidden, data.lengths[1:], data.documents, 0, confidence=data.confidence)
    assert "max_depth" in str(caught.value)
    assert "confidence" in str(caught.value)
    with pytest.raises(ValueError, match="non-finite"):
        train_depth_predictor(data.hidden * np.float32(np.nan), data.lengths, data.documents, MAX_DEPTH)
