"""Which weights a model runs on, by name. Imports no torch."""

from typing import Literal

# "full": a number each, in the arithmetic's dtype; "file": the blocks of a GGUF file as they are; else rounded at load.
Weights = Literal["full", "file", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_k_m", "q4_1", "q4_0"]
K_FORMATS = ("q6_k", "q5_k_m", "q4_k_m")  # mixes of blocks of 256, whose rounding needs ggml
AUTO = "auto"  # what is asked for where nothing is: "file" where that is faster, else "full"
