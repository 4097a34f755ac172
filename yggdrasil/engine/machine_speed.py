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

    _WALK, _CORES_WALK = 0.015, 0.004  # standard deviations: of what each changes by, a pass
    _BEGINNING, _CORES_BEGINNING = 0.3, 0.1  # of each when nothing was seen
    _NOISE = 0.05  # of a pass: it varies by half of that, and costs were not measured to a hundredth
    _EXTREME = 0.3  # a pass that surprises by more is the machine's pause

    def __init__(self) -> None:
        self._memory = self._cores = 0.0
        # Variances and covariance.
        self._of_memory, self._of_cores, self._of_both = self._BEGINNING**2, self._CORES_BEGINNING**2, 0.0

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
        self._of_memory += self._WALK**2
        self._of_cores += self._CORES_WALK**2
        memory = self._of_memory * waits + self._of_both * (1.0 - waits)  # covariances with this pass
        cores = self._of_both * waits + self._of_cores * (1.0 - waits)
        variance = memory * waits + cores * (1.0 - waits) + self._NOISE**2
        self._memory += memory / variance * surprise
        self._cores += cores / variance * surprise
        self._of_memory -= memory * memory / variance
        self._of_both -= memory * cores / variance
        self._of_cores -= cores * cores / variance
