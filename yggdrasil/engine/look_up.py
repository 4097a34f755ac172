"""How many guesses from the text itself to verify, where that is worth more than anything drafted."""

from collections.abc import Callable
from itertools import accumulate

from yggdrasil.engine.gate import Gate
from yggdrasil.engine.policy import Decision
from yggdrasil.engine.promises import KeptPromises
from yggdrasil.predictor.repetition import Repetition
from yggdrasil.tree.objective import StepCosts, TreeShape


class LookUps:
    """Guesses are a chain that costs a target pass and no drafting.

    Account and promises are apart from the trees': a text that breaks its habits says nothing of the drafter.
    """

    def __init__(self) -> None:
        self._gate, self._promises = Gate(), KeptPromises()
        self._estimate = 0.0  # tokens that the last chosen guesses promised by the text's own account, bonus included

    def begin(self) -> None:
        """A new request."""
        self._gate.begin()

    def choose(
        self,
        repeated: Repetition,
        room: int,
        costs: StepCosts,
        pace: float,
        worth: Callable[[float, float], float],
        least: float,
    ) -> Decision | None:
        """The guesses of greatest worth, ``room`` at most, if that is above ``least``.

        ``pace``: how slow a pass is now. ``worth(tokens, milliseconds)`` is what the objective maximises.
        """
        if self._gate.is_paused():
            return None
        survival = repeated.survival(room)
        best, totals = None, list(accumulate(survival, initial=1.0))
        for width in costs.verify_widths[1:]:
            shape = TreeShape(0, min(width - 1, len(survival)), width)
            estimate = totals[shape.depth]
            tokens = min(self._promises.honest([estimate])[0], shape.depth + 1.0)
            milliseconds = costs.iteration_ms(*shape) * pace
            if (value := worth(tokens, milliseconds)) > least:
                best, least, self._estimate = Decision(shape, tokens, milliseconds), value, estimate
        return best

    def settle(self, tokens: int, gained: float) -> None:
        """The chosen guesses gave ``tokens``, ``gained`` more than plain steps would have in their time."""
        self._promises.observe(self._estimate - 1.0, tokens - 1)
        self._gate.settle(gained)

    def passed(self) -> None:
        """An iteration did without: what is not tried is believed in the end, and the account recovers."""
        self._promises.forget()
        self._gate.rested()
