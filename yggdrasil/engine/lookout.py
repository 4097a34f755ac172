"""When a pass must be narrow, to tell how slow memory is.

Passes that wait for the cores take the same time however fast memory has become meanwhile, when fewer rows would be
worth more: nothing would ever tell.
"""

from collections.abc import Sequence

from yggdrasil.tree.step_costs import StepCosts


class Lookout:
    """Asks for a pass that waits for memory where none has been seen for a while, if there is such a width.

    ``costs`` are those of several places, of which one is named each time.
    """

    _EVERY = 32  # passes
    _WAITING = 0.7  # of a pass that tells, to the power of ``OVERLAP``: how much of it is waiting for memory

    def __init__(self, costs: Sequence[StepCosts]) -> None:
        self._unseen = 0  # passes since the last one that told
        self.use(costs)

    def use(self, costs: Sequence[StepCosts]) -> None:
        """Look by other costs of the same places."""
        self._telling = [self._widest_telling(each) for each in costs]

    def widest(self, place: int) -> int | None:
        """The most nodes that the next pass may read, where that matters: one of the widths there."""
        return self._telling[place] if self._unseen >= self._EVERY else None

    def passed(self, place: int, width: int) -> None:
        """A pass of ``width`` was seen."""
        telling = self._telling[place]
        self._unseen = 0 if telling is None or width <= telling else self._unseen + 1

    def _widest_telling(self, costs: StepCosts) -> int | None:
        """``None`` where trees of all widths wait for the cores."""
        telling = [width for width in costs.verify_widths[1:] if costs.read_share(width) >= self._WAITING]
        return max(telling, default=None)
