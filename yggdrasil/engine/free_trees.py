"""How much of the tree that costs no pass to verify, where that is worth more than anything drafted."""

from collections.abc import Callable, Sequence

from yggdrasil.engine.gate import Gate
from yggdrasil.engine.policy import Decision
from yggdrasil.engine.promises import KeptPromises
from yggdrasil.tree.objective import StepCosts, TreeShape


class FreeTrees:
    """Trees that cost a target pass and no drafting.

    Account and promises are apart from the drafted trees': a text that breaks its habits says nothing of the drafter.
    """

    def __init__(self) -> None:
        self._gate, self._promises = Gate(), KeptPromises()
        self._estimate = 0.0  # tokens that the last chosen tree promised by its own scores, bonus included

    def begin(self) -> None:
        """A new request."""
        self._gate.begin()

    def choose(
        self,
        expected: Sequence[float],
        depth: int,
        costs: StepCosts,
        pace: float,
        worth: Callable[[float, float], float],
        least: float,
    ) -> Decision | None:
        """The verify width of greatest worth, if that is above ``least``.

        ``expected[v]``: tokens that the tree's scores promise at ``costs.verify_widths[v]``, in ``depth`` levels.
        ``pace``: how slow a pass is now. ``worth(tokens, milliseconds)`` is what the objective maximises.
        """
        if self._gate.is_paused():
            return None
        best = None
        tokens_by_width = self._promises.honest(expected)
        for width, estimate, tokens in zip(costs.verify_widths[1:], expected[1:], tokens_by_width[1:], strict=True):
            shape = TreeShape(0, depth, width)
            likely = min(tokens, depth + 1.0)
            milliseconds = costs.iteration_ms(*shape) * pace
            if (value := worth(likely, milliseconds)) > least:
                best, least, self._estimate = Decision(shape, likely, milliseconds), value, estimate
        return best

    def settle(self, tokens: int, gained: float) -> None:
        """The chosen tree gave ``tokens``, ``gained`` more than plain steps would have in its time."""
        self._promises.observe(self._estimate - 1.0, tokens - 1)
        self._gate.settle(gained)

    def passed(self) -> None:
        """An iteration did without: what is not tried is believed in the end, and the account recovers."""
        self._promises.forget()
        self._gate.rested()
