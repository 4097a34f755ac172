"""The calibration map: monotone, bounded, and close to a known curve."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from yggdrasil.predictor import AcceptanceCalibration
from yggdrasil.predictor.acceptance import KNOT_LOG_PROBABILITY, MAX_ACCEPTANCE, MIN_ACCEPTANCE, NUM_KNOTS


def sampled_edges(
    num_edges: int, exponent: float, ceiling: float, seed: int = 0
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return edges whose true acceptance is ``ceiling * p ** exponent``."""
    random = np.random.default_rng(seed)
    log_probability = -random.gamma(1.0, 1.5, size=num_edges)
    return log_probability, random.uniform(size=num_edges) < ceiling * np.exp(exponent * log_probability)


def test_fit_recovers_a_known_curve() -> None:
    log_probability, accepted = sampled_edges(40_000, exponent=0.6, ceiling=0.95)

    calibration = AcceptanceCalibration.fit(log_probability, accepted)

    probe = np.log(np.linspace(0.02, 0.99, 50))
    truth = 0.95 * np.exp(0.6 * probe)
    assert np.abs(np.exp(calibration(probe)) - truth).max() < 0.04
    assert np.abs(np.exp(probe) - truth).max() > 0.1, "the identity would fail this test"
    estimate = np.exp(calibration(log_probability))
    for low, high in ((-12.0, -2.0), (-2.0, -0.5), (-0.5, -0.1), (-0.1, 0.0)):  # right on average, dense end included
        rows = (log_probability >= low) & (log_probability < high)
        assert estimate[rows].mean() == pytest.approx(accepted[rows].mean(), abs=0.02)


@pytest.mark.parametrize("num_edges", [1, 2, 10, 500])
@pytest.mark.parametrize("outcome", ["mixed", "all", "none"])
def test_fitted_map_rises_strictly_and_stays_in_bounds(num_edges: int, outcome: str) -> None:
    log_probability, accepted = sampled_edges(num_edges, exponent=1.0, ceiling=1.0)
    if outcome != "mixed":
        accepted = np.full(num_edges, outcome == "all")

    calibration = AcceptanceCalibration.fit(log_probability, accepted)

    assert calibration.knots.shape == (NUM_KNOTS,)
    assert calibration.knots.dtype == np.float32
    assert (np.diff(calibration.knots) > 0).all()
    assert calibration.knots[0] >= np.log(MIN_ACCEPTANCE) - 1e-5
    assert calibration.knots[-1] <= np.log(MAX_ACCEPTANCE) + 1e-7


def test_impossible_probabilities_are_accepted_as_input() -> None:
    calibration = AcceptanceCalibration.fit(np.array([-np.inf, -0.1, 0.0]), np.array([False, True, True]))

    assert calibration(np.array([-np.inf]))[0] == calibration.knots[0]


def test_identity_keeps_probabilities_between_the_clips() -> None:
    calibration = AcceptanceCalibration.identity()
    probe = np.linspace(-9.0, -0.1, 100).reshape(4, 25)

    assert calibration(probe) == pytest.approx(probe, abs=1e-4)
    assert calibration(probe).dtype == np.float32
    assert calibration(np.array([0.0]))[0] == pytest.approx(np.log(MAX_ACCEPTANCE))
    assert calibration(np.array([-50.0]))[0] == pytest.approx(np.log(MIN_ACCEPTANCE))


def test_values_at_and_between_knots_are_linear() -> None:
    calibration = AcceptanceCalibration.fit(*sampled_edges(2_000, exponent=0.8, ceiling=0.9))
    middle = (KNOT_LOG_PROBABILITY[:-1] + KNOT_LOG_PROBABILITY[1:]) / 2

    assert calibration(KNOT_LOG_PROBABILITY) == pytest.approx(calibration.knots)
    assert calibration(middle) == pytest.approx((calibration.knots[:-1] + calibration.knots[1:]) / 2, rel=1e-5)


def test_arrays_round_trip() -> None:
    calibration = AcceptanceCalibration.fit(*sampled_edges(100, exponent=0.8, ceiling=0.9))

    assert (AcceptanceCalibration.from_arrays(calibration.to_arrays()).knots == calibration.knots).all()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="no edges"):
        AcceptanceCalibration.fit(np.zeros(0), np.zeros(0, dtype=bool))
    with pytest.raises(ValueError, match="one length"):
        AcceptanceCalibration.fit(np.zeros(3), np.zeros(2, dtype=bool))
    with pytest.raises(ValueError, match="never fall"):
        AcceptanceCalibration(AcceptanceCalibration.identity().knots[::-1].copy())
    with pytest.raises(ValueError, match="float32"):
        AcceptanceCalibration(AcceptanceCalibration.identity().knots.astype(np.float16))
