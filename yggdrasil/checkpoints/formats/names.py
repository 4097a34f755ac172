"""Names of weight formats, as in the option ``--weights``. Imports no torch."""

from typing import Literal

# "full": unquantised, in the arithmetic's dtype; "file": the quantised blocks of the file; others: quantised at load.
Weights = Literal["full", "file", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_k_m", "q4_1", "q4_0"]
K_FORMATS = ("q6_k", "q5_k_m", "q4_k_m")  # mixes of formats with blocks of 256 weights; quantised by ggml
AUTO = "auto"  # the default: "file" if that is faster, else "full"
