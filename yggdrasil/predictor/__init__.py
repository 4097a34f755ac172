"""The depth predictor and the acceptance calibration. Inference needs only numpy; training is in ``training``."""

from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.depth import DepthPredictor

__all__ = ["AcceptanceCalibration", "DepthPredictor"]
