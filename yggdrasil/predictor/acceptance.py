"""Monotone map from draft probability to acceptance estimate, P(child accepted | parent accepted).

A fixed table over uniformly spaced log-probabilities, so that at run time it is one linear interpolation on a static
tensor. Dims: K knots.
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
    """Log-acceptance at K uniform log-probability knots, strictly increasing and below 0."""

    knots: npt.NDArray[np.float32]  # [K] log acceptance at KNOT_LOG_PROBABILITY

    def __post_init__(self) -> None:
        if self.knots.shape != (NUM_KNOTS,) or self.knots.dtype != np.float32:
            raise ValueError(f"knots must be [{NUM_KNOTS}] float32, got {self.knots.shape} {self.knots.dtype}")
        if not (np.isfinite(self.knots).all() and (np.diff(self.knots) >= 0).all() and self.knots[-1] < 0):
            raise ValueError("knots must be finite, never fall, and stay below log 1 = 0")

    @classmethod
    def identity(cls) -> AcceptanceCalibration:
        """Return the map that takes the draft probability itself, up to the clipping at both ends."""
        return cls(_clip_increasing(KNOT_LOG_PROBABILITY))

    @classmethod
    def fit(cls, log_probability: FloatArray, accepted: npt.NDArray[np.bool_]) -> AcceptanceCalibration:
        """Fit on edges whose parent was accepted: the drafter's log-probability and whether the child was accepted.

        Isotonic regression; each knot takes the mean of the fit over the edges around it, then neighbouring knots are
        averaged. Raises ValueError without edges.
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
        """Return log-acceptance, same shape; log-probabilities outside the table take the value at its end."""
        return np.interp(log_probability, KNOT_LOG_PROBABILITY, self.knots).astype(np.float32)

    def to_arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the arrays to store."""
        return {"acceptance.knots": self.knots}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> AcceptanceCalibration:
        """Rebuild from ``to_arrays``; other keys are ignored."""
        return cls(np.ascontiguousarray(arrays["acceptance.knots"]))


def _mean_around_knots(inputs: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return at each knot the mean of ``values``, weighted by how near they are; empty knots are interpolated.

    NOTE: reading an isotonic fit at probability 1 instead would take its last and most overfitted step, where most
    edges are. The mean of a rising fit under these weights still rises.
    """
    place = (inputs - LOG_PROBABILITY_MIN) / KNOT_STEP
    below = np.minimum(place.astype(np.int64), NUM_KNOTS - 2)
    knot, weight = np.concatenate([below, below + 1]), np.concatenate([1.0 - (place - below), place - below])
    weight = np.maximum(weight, 0.0)
    mass = np.bincount(knot, weight, minlength=NUM_KNOTS)
    total = np.bincount(knot, weight * np.tile(values, 2), minlength=NUM_KNOTS)
    seen = mass > 1e-9
    return np.interp(KNOT_LOG_PROBABILITY, KNOT_LOG_PROBABILITY[seen], total[seen] / mass[seen])


def _smooth(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Average over five knots; the ends are reflected through themselves, so a straight line stays as it is."""
    kernel = np.array([1.0, 2.0, 3.0, 2.0, 1.0]) / 9.0
    padded = np.pad(values, len(kernel) // 2, mode="reflect", reflect_type="odd")
    return np.convolve(padded, kernel, mode="valid")


def _clip_increasing(log_acceptance: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Clip to the admissible range without making a flat stretch (input: increasing)."""
    rising = TILT * (KNOT_LOG_PROBABILITY - LOG_PROBABILITY_MIN)
    falling = TILT * KNOT_LOG_PROBABILITY
    floored = np.maximum(log_acceptance, np.log(MIN_ACCEPTANCE) + rising)
    knots: npt.NDArray[np.float32] = np.minimum(floored, np.log(MAX_ACCEPTANCE) + falling).astype(np.float32)
    return knots
