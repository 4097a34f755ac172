"""Which weights a model runs on, by name. Imports no torch."""

from typing import Literal

Weights = Literal["full", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]  # full: as the checkpoint has them
