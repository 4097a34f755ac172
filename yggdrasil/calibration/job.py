"""A calibration under way: what is calibrated and on what, and where its work and its progress go."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from yggdrasil.calibration.calibration_settings import CalibrationSettings, PairSource
from yggdrasil.calibration.reporter import Reporter
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.engine.assembly import Assembly


class Job(NamedTuple):
    """Everything that the parts of a calibration work on.

    ``pair`` is that of ``settings``, its threads and what a head drafts among decided.
    """

    settings: CalibrationSettings
    pair: PairSource
    assembly: Assembly
    tokenizer: Tokenizer
    texts: Sequence[Sequence[int]]  # prompts as tokens
    work: Path  # the folder of unfinished work
    reporter: Reporter
