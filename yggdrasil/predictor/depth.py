"""The depth predictor: estimates P(accepted length >= d) before a tree is drafted. Numpy only.

The network is a two-layer MLP encoder with one logistic output per depth. Output d gives P(length >= d | length >=
d - 1). Callers get the running product over depths, which never rises.

Dims: F features (see ``features``), E encoder size, D max depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Float32Array: TypeAlias = npt.NDArray[np.float32]

_KEY_PREFIX = "depth."


@dataclass(frozen=True, eq=False)
class DepthPredictor:
    """The predictor's weights. The outputs' Platt calibration is folded into ``head_weight`` and ``head_bias``."""

    mean: Float32Array  # [F] of the training features
    scale: Float32Array  # [F] their standard deviation, never 0
    first_weight: Float32Array  # [F, E]
    first_bias: Float32Array  # [E]
    second_weight: Float32Array  # [E, E]
    second_bias: Float32Array  # [E]
    head_weight: Float32Array  # [E, D]
    head_bias: Float32Array  # [D]
    _folded_weight: Float32Array = field(init=False, repr=False)  # [E, F] normalisation and first layer in one
    _folded_bias: Float32Array = field(init=False, repr=False)  # [E]

    def __post_init__(self) -> None:
        _check_weights({item.name: getattr(self, item.name) for item in fields(self) if item.init})
        folded = self.first_weight / self.scale[:, None]
        object.__setattr__(self, "_folded_weight", np.ascontiguousarray(folded.T))
        object.__setattr__(self, "_folded_bias", self.first_bias - self.mean @ folded)

    @property
    def num_features(self) -> int:
        """F, the number of the depth predictor's input features."""
        return len(self.mean)

    @property
    def max_depth(self) -> int:
        """D, the largest depth that the predictor knows: it predicts P(accepted length >= d) for d = 1 .. D."""
        return len(self.head_bias)

    def survival(self, features: Float32Array) -> Float32Array:
        """Return P(accepted length >= d) for d = 1 .. D, [..., D] float32, from ``features`` [..., F] float32.

        The accepted length is the number of drafted tokens that the target accepts, without the bonus token.
        """
        half_logits = self.conditional_logits(features) * np.float32(0.5)
        conditional = np.tanh(half_logits) * np.float32(0.5) + np.float32(0.5)  # a sigmoid that cannot overflow
        return np.multiply.accumulate(conditional, axis=-1, dtype=np.float32)

    def conditional_logits(self, features: Float32Array) -> Float32Array:
        """Return the logits of P(length >= d | length >= d - 1), [..., D] for depths d from 1 to D, ascending.

        Args:
            features: [..., F] float32 input features.
        """
        if features.ndim == 1:
            # NOTE: a matrix product would start BLAS threads, which then spin on the cores that run the models.
            first = np.einsum("ef,f->e", self._folded_weight, features)
        else:
            first = features @ self._folded_weight.T
        encoded = np.maximum(first + self._folded_bias, 0.0)
        encoded = np.maximum(encoded @ self.second_weight + self.second_bias, 0.0)
        logits: Float32Array = encoded @ self.head_weight + self.head_bias
        return logits

    def to_arrays(self) -> dict[str, Float32Array]:
        """Return the weights for a safetensors file: ``depth.FIELD`` -> array, for each field of the constructor."""
        return {_KEY_PREFIX + item.name: getattr(self, item.name) for item in fields(self) if item.init}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> DepthPredictor:
        """Rebuild the predictor from named arrays, of which only names with the prefix ``depth.`` are read.

        Raises:
            ValueError: an array is missing, or shapes or dtypes disagree.
        """
        names = [item.name for item in fields(cls) if item.init]
        missing = [_KEY_PREFIX + name for name in names if _KEY_PREFIX + name not in arrays]
        if missing:
            raise ValueError(f"not a stored depth predictor, missing {missing}")
        return cls(**{name: np.ascontiguousarray(arrays[_KEY_PREFIX + name]) for name in names})


def _check_weights(weights: dict[str, Float32Array]) -> None:
    num_features, encoder_size, max_depth = len(weights["mean"]), len(weights["first_bias"]), len(weights["head_bias"])
    expected = {
        "mean": (num_features,),
        "scale": (num_features,),
        "first_weight": (num_features, encoder_size),
        "first_bias": (encoder_size,),
        "second_weight": (encoder_size, encoder_size),
        "second_bias": (encoder_size,),
        "head_weight": (encoder_size, max_depth),
        "head_bias": (max_depth,),
    }
    faults = [
        f"{name} must be {shape} float32, got {weights[name].shape} {weights[name].dtype}"
        for name, shape in expected.items()
        if weights[name].shape != shape or weights[name].dtype != np.float32
    ]
    faults += [f"{name} holds non-finite values" for name, value in weights.items() if not np.isfinite(value).all()]
    if not (weights["scale"] > 0).all():
        faults.append("scale must be positive")
    if faults:
        raise ValueError("; ".join(faults))
