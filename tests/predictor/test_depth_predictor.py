"""The run-time predictor against the network written out in float64."""

from dataclasses import replace
from math import exp
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from yggdrasil.predictor import DepthPredictor

HIDDEN, ENCODER, DEPTH = 12, 8, 5


@pytest.fixture
def predictor() -> DepthPredictor:
    random = np.random.default_rng(0)
    shapes = [(HIDDEN,), (HIDDEN,), (HIDDEN, ENCODER), (ENCODER,), (ENCODER, ENCODER), (ENCODER,)]
    weights = [random.normal(size=shape).astype(np.float32) for shape in [*shapes, (ENCODER, DEPTH), (DEPTH,)]]
    weights[1] = np.abs(weights[1]) + np.float32(0.1)
    return DepthPredictor(*weights)


def slow_survival(predictor: DepthPredictor, hidden: npt.NDArray[np.float32]) -> list[float]:
    """Return the survival of one hidden state, layer by layer and head by head."""
    values = [float(value) for value in (hidden.astype(float) - predictor.mean) / predictor.scale]
    for weight, bias in (
        (predictor.first_weight, predictor.first_bias),
        (predictor.second_weight, predictor.second_bias),
    ):
        values = [max(0.0, float(np.dot(values, weight[:, unit]) + bias[unit])) for unit in range(len(bias))]
    survival, product = [], 1.0
    for depth in range(predictor.max_depth):
        product *= 1.0 / (1.0 + exp(-(np.dot(values, predictor.head_weight[:, depth]) + predictor.head_bias[depth])))
        survival.append(product)
    return survival


def test_survival_matches_the_slow_network(predictor: DepthPredictor) -> None:
    hidden = np.random.default_rng(1).normal(size=(20, HIDDEN)).astype(np.float32)

    for row in hidden:
        assert predictor.survival(row) == pytest.approx(slow_survival(predictor, row), rel=1e-3, abs=1e-6)
    assert predictor.survival(hidden) == pytest.approx(np.stack([predictor.survival(row) for row in hidden]), abs=1e-6)


def test_survival_is_a_falling_probability_even_for_extreme_input(predictor: DepthPredictor) -> None:
    for size in (0.0, 1.0, 1e4, 1e8):
        survival = predictor.survival(np.full(HIDDEN, size, dtype=np.float32))

        assert survival.shape == (DEPTH,)
        assert survival.dtype == np.float32
        assert (np.diff(survival) <= 0).all()
        assert (survival >= 0).all()
        assert (survival <= 1).all()


def test_safetensors_round_trip(predictor: DepthPredictor, tmp_path: Path) -> None:
    save_file(predictor.to_arrays(), tmp_path / "predictor.safetensors")

    loaded = DepthPredictor.from_arrays(load_file(tmp_path / "predictor.safetensors"))

    hidden = np.ones(HIDDEN, dtype=np.float32)
    assert (loaded.survival(hidden) == predictor.survival(hidden)).all()
    assert (loaded.num_features, loaded.max_depth) == (HIDDEN, DEPTH)


def test_weights_that_do_not_fit_are_refused(predictor: DepthPredictor) -> None:
    with pytest.raises(ValueError, match="missing"):
        DepthPredictor.from_arrays({})
    with pytest.raises(ValueError, match=r"second_bias must be \(8,\)"):
        replace(predictor, second_bias=np.zeros(3, dtype=np.float32))
    with pytest.raises(ValueError, match="scale must be positive"):
        replace(predictor, scale=np.zeros(HIDDEN, dtype=np.float32))
    with pytest.raises(ValueError, match="head_bias holds non-finite"):
        replace(predictor, head_bias=np.full(DEPTH, np.nan, dtype=np.float32))
