"""How slow memory and the cores are now: what a pass costs, and what more rows of it cost, follows from both.

A machine's memory serves others too. It has been seen to take four thirds of the time for seconds, then not, while the
cores computed as fast as before: a pass of eight rows cost eight hundredths more than one of six, then nothing.
"""

from math import exp, log

from yggdrasil.tree.step_costs import OVERLAP


class MachineSpeed:
    """A Kalman filter over two logarithms: how slow memory and the cores are beside the calibration.

    It learns from how long each pass of the target took, drafting apart, and knows the two apart by passes that wait
    for one or the other. Where nothing says which of them has changed, memory has: its variance grows faster.
    """

    _WALK, _CORES_WALK = 0.015, 0.004  # standard deviations: of what each changes by, a pass
    _BEGINNING, _CORES_BEGINNING = 0.3, 0.1  # of each when nothing was seen
    _NOISE = 0.05  # of a pass: it varies by half of that, and costs were not measured to a hundredth
    _EXTREME = 0.3  # a pass that surprises by more is the machine's pause, but for the first
    _FARTHEST = 10.0  # that the machine of now may be from the calibrated one
    _MOST = 2.0  # that memory may be slower or faster beside the cores: 1.4 was seen

    def __init__(self) -> None:
        self._memory = self._cores = 0.0
        # Variances and covariance.
        self._of_memory, self._of_cores, self._of_both = self._BEGINNING**2, self._CORES_BEGINNING**2, 0.0
        self._is_known = False

    @property
    def of_memory(self) -> float:
        """How slow memory is beside the cores, 1 as calibrated."""
        return min(max(exp(self._memory - self._cores), 1.0 / self._MOST), self._MOST)

    def of_pass(self, read_share: float) -> float:
        """Times its calibrated time that a pass takes now; ``read_share`` as ``StepCosts`` gives it."""
        return float(sum(self._parts(read_share)) ** (1.0 / OVERLAP))

    def observe(self, read_share: float, over_calibrated: float) -> tuple[float, float]:
        """A pass took ``over_calibrated`` times what it was calibrated to.

        Returns how many times slower than before a pass of one row and one like this are believed to be.
        """
        before = self._memory
        reading, computing = self._parts(read_share)
        surprise = log(max(over_calibrated, 1.0 / self._FARTHEST)) - log(reading + computing) / OVERLAP
        most = self._EXTREME if self._is_known else log(self._FARTHEST)
        surprise, self._is_known = min(max(surprise, -most), most), True
        waits = reading / (reading + computing)  # for memory: of what one more hundredth of its slowness takes
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
        return exp(self._memory - before), self.of_pass(read_share) / (reading + computing) ** (1.0 / OVERLAP)

    def _parts(self, read_share: float) -> tuple[float, float]:
        """What reading and computing take, to the power of ``OVERLAP``, of a pass that takes 1 as calibrated."""
        return read_share * exp(OVERLAP * self._memory), (1.0 - read_share) * exp(OVERLAP * self._cores)
