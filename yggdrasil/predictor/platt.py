"""Platt calibration of a depth predictor's outputs on validation positions. Imports scipy lazily.

Dims: n positions, F features, D max depth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from yggdrasil.predictor.depth import DepthPredictor, Float32Array

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]

# Weight of the prior that pulls (slope, shift) towards (1, 0), in observations: a small validation set changes little.
PRIOR = 4.0
MIN_POSITIONS = 20
MAX_SLOPE = 10.0


def calibrate_outputs(predictor: DepthPredictor, features: Float32Array, lengths: IntArray) -> DepthPredictor:
    """Return ``predictor`` with a Platt calibration of each depth's output, fitted on validation positions.

    A slope and a shift of depth d are fitted on positions with length >= d - 1, and folded into the output weights. A
    depth keeps its weights if there are fewer than 20 such positions, or if all or none of these reach d.

    Args:
        features: [n, F] input features of the positions.
        lengths: [n] accepted length at each position.
    """
    logits = predictor.conditional_logits(features)  # [n, D]
    slopes, shifts = np.ones(predictor.max_depth), np.zeros(predictor.max_depth)
    for depth in range(1, predictor.max_depth + 1):
        is_reached_parent = lengths >= depth - 1
        reached = lengths[is_reached_parent] >= depth
        if len(reached) < MIN_POSITIONS or reached.all() or not reached.any():
            continue
        slopes[depth - 1], shifts[depth - 1] = fit_platt(logits[is_reached_parent, depth - 1], reached)
    return replace(
        predictor,
        head_weight=(predictor.head_weight * slopes).astype(np.float32),
        head_bias=(predictor.head_bias * slopes + shifts).astype(np.float32),
    )


def fit_platt(logits: FloatArray, reached: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Return (slope >= 0, shift) that minimise the log-loss of the logits ``slope * logit + shift``.

    A prior pulls slope and shift towards (1, 0). The slope is at most 10, the shift between -20 and 20.

    Args:
        logits: [n] the predictor's logits that a draft reaches a given depth.
        reached: [n] whether the draft reached that depth.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    inputs, labels = logits.astype(np.float64), reached.astype(np.float64)

    def loss_and_gradient(point: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        slope, shift = point
        scores = slope * inputs + shift
        error = 0.5 * np.tanh(0.5 * scores) + 0.5 - labels
        loss = np.sum(np.logaddexp(0.0, scores) - labels * scores) + 0.5 * PRIOR * ((slope - 1.0) ** 2 + shift**2)
        gradient = np.array([error @ inputs + PRIOR * (slope - 1.0), error.sum() + PRIOR * shift])
        return float(loss), gradient

    bounds = [(0.0, MAX_SLOPE), (-20.0, 20.0)]
    found = minimize(loss_and_gradient, np.array([1.0, 0.0]), jac=True, method="L-BFGS-B", bounds=bounds)
    return float(found.x[0]), float(found.x[1])
