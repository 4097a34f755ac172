"""The state that the parts of a calibration share."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from yggdrasil.calibration.calibration_settings import CalibrationSettings, PairSource
from yggdrasil.calibration.reporter import Reporter
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.engine.assembly import Assembly


class Job(NamedTuple):
    """A running calibration: settings, models, prompts, work folder and reporter.

    ``pair`` is ``settings.pair`` with its thread counts and draft vocabulary set.
    """

    settings: CalibrationSettings
    pair: PairSource
    assembly: Assembly
    tokenizer: Tokenizer
    texts: Sequence[Sequence[int]]  # prompts as token ids
    work: Path  # folder of intermediate results
    reporter: Reporter
