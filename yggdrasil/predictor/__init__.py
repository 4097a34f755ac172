"""The depth predictor and the acceptance calibration. Running them needs only numpy; training is in ``training``."""

from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.depth import DepthPredictor

__all__ = ["AcceptanceCalibration", "DepthPredictor"]
