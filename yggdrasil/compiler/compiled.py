"""Definitions common to all backends: names of backends, the type of a step, the time spent on building steps."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from torch import Tensor

# "native": native steps if they cover the model, else "inductor" ("eager" for a draft head). "uncompiled": native steps
# if they cover the model, else "eager", which needs no compilation. "cudagraph": steps recorded as CUDA graphs.
Backend = Literal["native", "uncompiled", "inductor", "eager", "cudagraph"]
Step: TypeAlias = Callable[[], Sequence[Tensor]]  # reads and writes tensors that are fixed when the step is built


class BuildClock:
    """Total nanoseconds spent on building steps, to be subtracted when a first use is timed."""

    ns = 0
