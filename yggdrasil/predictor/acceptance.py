"""Monotone map from draft probability to acceptance estimate, P(child accepted | parent accepted).

The map is a table over K uniformly spaced log-probabilities (knots), so applying it is one linear interpolation in a
static tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

NUM_KNOTS = 128
LOG_PROBABILITY_MIN = -12.0
KNOT_STEP = -LOG_PROBABILITY_MIN / (NUM_KNOTS - 1)
KNOT_LOG_PROBABILITY = np.linspace(LOG_PROBABILITY_MIN, 0.0, NUM_KNOTS)  # [K]

MIN_ACCEPTANCE = 1e-4
MAX_ACCEPTANCE = 1.0 - 1e-4
# Slope given to flat stretches: siblings with the same acceptance estimate stay ordered by draft probability.
TILT = 1e-4

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class AcceptanceCalibration:
    """A map from draft log-probability to log-acceptance, as values at K uniform knots that never fall and are below 0.

    Raises:
        ValueError: ``knots`` is not [128] float32, is not finite, falls, or reaches 0.
    """

    knots: npt.NDArray[np.float32]  # [K] log acceptance at KNOT_LOG_PROBABILITY

    def __post_init__(self) -> None:
        if self.knots.shape != (NUM_KNOTS,) or self.knots.dtype != np.float32:
            raise ValueError(f"knots must be [{NUM_KNOTS}] float32, got {self.knots.shape} {self.knots.dtype}")
        if not (np.isfinite(self.knots).all() and (np.diff(self.knots) >= 0).all() and self.knots[-1] < 0):
            raise ValueError("knots must be finite, never fall, and stay below log 1 = 0")

    @classmethod
    def identity(cls) -> AcceptanceCalibration:
        """Return the calibration whose acceptance estimate is the draft probability, clipped to 1e-4 to 0.9999."""
        return cls(_clip_increasing(KNOT_LOG_PROBABILITY))

    @classmethod
    def fit(cls, log_probability: FloatArray, accepted: npt.NDArray[np.bool_]) -> AcceptanceCalibration:
        """Fit the map from draft log-probability to acceptance on recorded tree edges whose parent was accepted.

        The fit is an isotonic regression. Each knot is the mean of the fitted values around it; neighbouring knots are
        averaged.

        Args:
            log_probability: [n] the drafter's log-probability of each child.
            accepted: [n] whether the target accepted the child.

        Raises:
            ValueError: there are no edges, or the shapes differ.
        """
        from sklearn.isotonic import IsotonicRegression

        if log_probability.shape != accepted.shape or log_probability.ndim != 1:
            raise ValueError(f"need two vectors of one length, got {log_probability.shape} and {accepted.shape}")
        if not len(log_probability):
            raise ValueError("no edges to fit on: record traces first, or use AcceptanceCalibration.identity()")
        isotonic = IsotonicRegression(y_min=MIN_ACCEPTANCE, y_max=MAX_ACCEPTANCE, out_of_bounds="clip")
        inputs = np.clip(log_probability, LOG_PROBABILITY_MIN, 0.0).astype(np.float64)
        fitted = isotonic.fit_transform(inputs, accepted.astype(np.float64))
        smooth = _smooth(np.log(_mean_around_knots(inputs, fitted)))
        return cls(_clip_increasing(smooth + TILT * KNOT_LOG_PROBABILITY))

    def __call__(self, log_probability: FloatArray) -> npt.NDArray[np.float32]:
        """Return log-acceptance, float32 in the shape of ``log_probability``, which is clamped to -12 .. 0."""
        return np.interp(log_probability, KNOT_LOG_PROBABILITY, self.knots).astype(np.float32)

    def to_arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the calibration as named arrays for a safetensors file: ``acceptance.knots``, [K] float32."""
        return {"acceptance.knots": self.knots}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> AcceptanceCalibration:
        """Rebuild the calibration from named arrays, of which only ``acceptance.knots`` is read.

        Raises:
            KeyError: there are no knots.
            ValueError: the knots have another shape or dtype, or fall.
        """
        return cls(np.ascontiguousarray(arrays["acceptance.knots"]))


def _mean_around_knots(inputs: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return at each knot the proximity-weighted mean of ``values``, [K]; knots without values are interpolated.

    NOTE: evaluating the isotonic fit at probability 1 instead would use its last step, which is overfitted and has
    most edges. Under these weights the mean of a rising fit still rises.
    """
    position = (inputs - LOG_PROBABILITY_MIN) / KNOT_STEP
    below = np.minimum(position.astype(np.int64), NUM_KNOTS - 2)
    knot, weight = np.concatenate([below, below + 1]), np.concatenate([1.0 - (position - below), position - below])
    weight = np.maximum(weight, 0.0)
    mass = np.bincount(knot, weight, minlength=NUM_KNOTS)
    total = np.bincount(knot, weight * np.tile(values, 2), minlength=NUM_KNOTS)
    seen = mass > 1e-9
    return np.interp(KNOT_LOG_PROBABILITY, KNOT_LOG_PROBABILITY[seen], total[seen] / mass[seen])


def _smooth(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Smooth ``values`` [K] over five knots. Odd reflection at the ends keeps a straight line unchanged."""
    kernel = np.array([1.0, 2.0, 3.0, 2.0, 1.0]) / 9.0
    padded = np.pad(values, len(kernel) // 2, mode="reflect", reflect_type="odd")
    return np.convolve(padded, kernel, mode="valid")


def _clip_increasing(log_acceptance: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Clip increasing values to the allowed range and keep them strictly increasing, [K] float32."""
    rising = TILT * (KNOT_LOG_PROBABILITY - LOG_PROBABILITY_MIN)
    falling = TILT * KNOT_LOG_PROBABILITY
    floored = np.maximum(log_acceptance, np.log(MIN_ACCEPTANCE) + rising)
    knots: npt.NDArray[np.float32] = np.minimum(floored, np.log(MAX_ACCEPTANCE) + falling).astype(np.float32)
    return knots
