"""When a pass must be narrow, to tell how slow memory is.

Passes that wait for the cores take the same time however fast memory has become meanwhile, when fewer rows would be
worth more: nothing would ever tell.
"""

from collections.abc import Sequence

from yggdrasil.tree.step_costs import StepCosts


class Lookout:
    """Asks for a pass that waits for memory where none has been seen for a while, if there is such a width.

    ``calibrated`` are the costs of several places, of which one is named each time.
    """

    _EVERY = 32  # passes
    _WAITING = 0.7  # of a pass that tells, to the power of ``OVERLAP``: how much of it is waiting for memory

    def __init__(self, calibrated: Sequence[StepCosts]) -> None:
        self._calibrated = calibrated
        self._unseen = 0  # passes since the last one that told
        self.use(calibrated)

    def use(self, costs: Sequence[StepCosts]) -> None:
        """Look by other costs of the same places, such as are believed now.

        A pass tells that waits for memory by both. By what is believed wide ones may, where memory is thought slow; if
        it is not, they take as long as they always did.
        """
        self._telling = [self._widest_telling(*each) for each in zip(self._calibrated, costs, strict=True)]

    def widest(self, place: int) -> int | None:
        """The most nodes that the next pass may read, where that matters: one of the widths there."""
        return self._telling[place] if self._unseen >= self._EVERY else None

    def passed(self, place: int, width: int) -> None:
        """A pass of ``width`` was seen."""
        telling = self._telling[place]
        self._unseen = 0 if telling is None or width <= telling else self._unseen + 1

    def _widest_telling(self, *costs: StepCosts) -> int | None:
        """``None`` where trees of all widths wait for the cores."""
        widths = costs[0].verify_widths[1:]
        telling = [width for width in widths if all(each.read_share(width) >= self._WAITING for each in costs)]
        return max(telling, default=None)
