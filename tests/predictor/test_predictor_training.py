"""Training: it learns a signal, beats a constant rate, leaks nothing, and survives tiny data."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from yggdrasil.predictor.platt import fit_platt
from yggdrasil.predictor.training import split_documents, train_depth_predictor

MAX_DEPTH = 4


class Data(NamedTuple):
    hidden: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    truth: npt.NDArray[np.float64]  # P(length >= d)


def synthetic(num_documents: int, positions: int, seed: int = 0) -> Data:
    """Return lengths whose rate depends on |hidden[0]|, so no linear model sees it."""
    random = np.random.default_rng(seed)
    num_rows = num_documents * positions
    hidden = random.normal(3.0, 2.0, size=(num_rows, 16)).astype(np.float32)
    signal = np.abs(hidden[:, 0] - 3.0) / 2.0
    rate = 1.0 / (1.0 + np.exp(-(3.0 * signal - 2.0)))
    alive = np.cumprod(random.uniform(size=(num_rows, MAX_DEPTH)) < rate[:, None], axis=1)
    depths = np.arange(1, MAX_DEPTH + 1)
    documents = np.repeat(np.arange(num_documents) * 7 + 3, positions)
    return Data(hidden, alive.sum(axis=1), documents, rate[:, None] ** depths)


@pytest.fixture(scope="module")
def data() -> Data:
    return synthetic(num_documents=40, positions=75)


def test_predictor_learns_the_signal_and_beats_a_constant_rate(data: Data) -> None:
    predictor, split = train_depth_predictor(data.hidden, data.lengths, data.documents, MAX_DEPTH)

    survival, held_out = predictor.survival(data.hidden), np.isin(data.documents, split.held_out)
    assert (np.diff(survival, axis=1) <= 0).all()
    assert np.abs(survival - data.truth).mean() < 0.08
    assert survival.mean(axis=0) == pytest.approx(data.truth.mean(axis=0), abs=0.04)  # calibrated on the whole
    for depth in range(1, MAX_DEPTH + 1):
        reached, predicted = data.lengths[held_out] >= depth, survival[held_out, depth - 1]
        assert ((predicted - reached) ** 2).mean() < 0.9 * reached.mean() * (1 - reached.mean())


def test_held_out_documents_cannot_influence_the_predictor() -> None:
    data = synthetic(num_documents=12, positions=60)
    predictor, split = train_depth_predictor(data.hidden, data.lengths, data.documents, MAX_DEPTH)
    held_out = np.isin(data.documents, split.held_out)
    assert held_out.sum() == 180

    hidden, lengths = data.hidden.copy(), data.lengths.copy()
    hidden[held_out] *= -5.0
    lengths[held_out] = 0
    again, _ = train_depth_predictor(hidden, lengths, data.documents, MAX_DEPTH)

    for name, weight in predictor.to_arrays().items():
        assert (weight == again.to_arrays()[name]).all(), name
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

    predictor, _ = train_depth_predictor(data.hidden, values, data.documents, MAX_DEPTH)

    survival = predictor.survival(data.hidden)
    assert np.isfinite(survival).all()
    assert (np.diff(survival, axis=1) <= 0).all()
    if lengths != "mixed":
        assert (survival[:, 0] > 0.5).all() == (lengths == "all")


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
