"""Belief about trees that cost a target pass and no drafting: what their widths give and take."""

from collections.abc import Sequence
from typing import NamedTuple

from yggdrasil.engine.budget import Budget
from yggdrasil.engine.policy import Decision
from yggdrasil.engine.promises import KeptPromises
from yggdrasil.tree.objective import Objective, worth
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.stakes import Stakes, stakes_of
from yggdrasil.tree.step_costs import StepCosts


class _Pass(NamedTuple):
    """What verifying so many nodes takes at the calibration's pace, and what a token of it is worth."""

    width: int
    milliseconds: float
    weight: float


class FreeTrees:
    """What is believed of them, apart from drafted trees: a text that breaks its habits says nothing of a drafter.

    ``costs`` are those of several places, of which one is named each time.
    """

    def __init__(self, costs: Sequence[StepCosts], objective: Objective) -> None:
        self.budget = Budget()
        self._promises = KeptPromises()
        self._estimate = 1.0  # tokens that the best tree promises by its own scores, bonus included
        self._objective: Objective = objective
        self.use(costs)

    def use(self, costs: Sequence[StepCosts]) -> None:
        """Decide by other costs of the same places."""
        self._passes = [_passes(each, self._objective) for each in costs]
        self._stakes = [stakes_of((each.width, each.weight) for each in passes) for passes in self._passes]

    def stakes(self, place: int) -> Stakes:
        """What ``best`` goes by; it holds until the next call."""
        stakes = self._stakes[place]
        stakes[0] = self._promises.kept
        return stakes

    def best(
        self, expected: Sequence[float], depth: int, place: int, pace: float, widest: int | None = None
    ) -> Decision:
        """The verify width that is worth most, a plain step's left out.

        ``expected[v]``: tokens that the tree's scores promise at ``costs.verify_widths[v]``, in ``depth`` levels.
        ``pace``: how slow a pass is now. ``widest``: one of those widths, beyond which none is asked for.
        """
        kept, most = self._promises.kept, depth + 1.0
        best, likely, value = None, 1.0, 0.0
        for each, promised in zip(self._passes[place], expected[1:], strict=True):  # no calls: a pass waits for this
            tokens = 1.0 + (promised - 1.0) * kept
            if tokens > most:
                tokens = most
            if (found := tokens * each.weight) > value:
                best, likely, value, self._estimate = each, tokens, found, promised
            if each.width == widest:
                break
        assert best is not None, "a plan has more than one verify width"
        return Decision(TreeShape(0, depth, best.width), likely, best.milliseconds * pace)

    def settle(self, tokens: int, gained: float) -> None:
        """The best tree gave ``tokens``, ``gained`` more than plain steps would have in its time."""
        self._promises.observe(self._estimate - 1.0, tokens - 1)
        self.budget.settle(gained)

    def passed(self) -> None:
        """An iteration did without: what is not tried is believed as its scores say, in the end."""
        self._promises.forget()
        self.budget.earn()


def _passes(costs: StepCosts, objective: Objective) -> list[_Pass]:
    times = {width: costs.free_ms(width) for width in costs.verify_widths[1:]}
    return [_Pass(width, ms, worth(1.0, ms, objective)) for width, ms in times.items()]
