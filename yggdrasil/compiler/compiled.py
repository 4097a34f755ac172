"""What every way of running steps shares: the backends' names, the type of a step, and the time spent on building."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from torch import Tensor

# "native": steps made from the configuration where its family is covered, else those of "inductor"; "uncompiled": else
# those of "eager", which are there at once.
Backend = Literal["native", "uncompiled", "inductor", "eager", "cudagraph"]
Step: TypeAlias = Callable[[], Sequence[Tensor]]  # over tensors fixed at construction: only their values change


class BuildClock:
    """Nanoseconds spent on making steps ready, in all; so that a first use is not taken for a slow step."""

    ns = 0
