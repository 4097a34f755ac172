"""How slow memory is now beside the cores: by that, passes of many rows cost more than those of few, or hardly more.

A machine's memory serves others too. It has been seen to take four thirds of the time for seconds, then not, while the
cores computed as fast as before: a pass of eight rows cost eleven hundredths more than one of six, then nothing.
"""

from math import exp, log

from yggdrasil.tree.objective import OVERLAP


class MemorySpeed:
    """A Kalman filter over two logarithms: how slow memory is and how slow the cores are, beside the calibration.

    It learns from how long each pass took, and knows the two apart by passes that wait for one or the other. Where
    nothing says which of them has changed, memory has: its variance grows faster.
    """

    _WALK = 0.015**2, 0.004**2  # of each, an iteration
    _BEGINNING = 0.3**2, 0.1**2
    _NOISE = 0.05**2  # of one pass: it varies by half of that, and costs were not measured to a hundredth
    _EXTREME = 0.3  # a pass that surprises by more is the machine's pause

    def __init__(self) -> None:
        self._memory = self._cores = 0.0
        (self._of_memory, self._of_cores), self._of_both = self._BEGINNING, 0.0  # variances and covariance

    @property
    def slowness(self) -> float:
        """Of memory beside the cores, 1 as calibrated."""
        return exp(self._memory - self._cores)

    def observe(self, read_share: float, slowness: float) -> None:
        """A pass took ``slowness`` times what it was calibrated to; ``read_share`` as ``StepCosts`` gives it."""
        reading = read_share * exp(OVERLAP * self._memory)
        computing = (1.0 - read_share) * exp(OVERLAP * self._cores)
        surprise = log(slowness) - log(reading + computing) / OVERLAP
        surprise = min(max(surprise, -self._EXTREME), self._EXTREME)
        waits = reading / (reading + computing)  # for memory, so much of what one more hundredth takes
        walk, walk_of_cores = self._WALK
        self._of_memory += walk
        self._of_cores += walk_of_cores
        memory = self._of_memory * waits + self._of_both * (1.0 - waits)  # covariances with this pass
        cores = self._of_both * waits + self._of_cores * (1.0 - waits)
        variance = memory * waits + cores * (1.0 - waits) + self._NOISE
        self._memory += memory / variance * surprise
        self._cores += cores / variance * surprise
        self._of_memory -= memory * memory / variance
        self._of_both -= memory * cores / variance
        self._of_cores -= cores * cores / variance
