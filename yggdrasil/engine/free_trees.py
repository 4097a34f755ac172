"""Belief about trees that cost a target pass and no drafting: what their widths give and take."""

from collections.abc import Sequence

from yggdrasil.engine.budget import Budget
from yggdrasil.engine.promises import KeptPromises
from yggdrasil.tree.objective import Candidate, Objective, StepCosts, TreeShape, worth


class FreeTrees:
    """What is believed of them, apart from drafted trees: a text that breaks its habits says nothing of a drafter."""

    def __init__(self) -> None:
        self.budget = Budget()
        self._promises = KeptPromises()
        self._estimate = 1.0  # tokens that the best tree promises by its own scores, bonus included

    def best(
        self, expected: Sequence[float], depth: int, costs: StepCosts, pace: float, objective: Objective
    ) -> Candidate:
        """The verify width that is worth most, a plain step's left out.

        ``expected[v]``: tokens that the tree's scores promise at ``costs.verify_widths[v]``, in ``depth`` levels.
        ``pace``: how slow a pass is now.
        """
        widths, tokens, most = costs.verify_widths, self._promises.honest(expected), depth + 1.0
        best, likely, value = 1, 1.0, 0.0
        for i in range(1, len(widths)):
            milliseconds = (costs.verify_ms[widths[i]] + costs.overhead_ms) * pace
            if (found := worth(min(tokens[i], most), milliseconds, objective)) > value:
                best, likely, value = i, min(tokens[i], most), found
        self._estimate = expected[best]
        return Candidate(TreeShape(0, depth, widths[best]), likely, value)

    def settle(self, tokens: int, gained: float) -> None:
        """The best tree gave ``tokens``, ``gained`` more than plain steps would have in its time."""
        self._promises.observe(self._estimate - 1.0, tokens - 1)
        self.budget.settle(gained)

    def passed(self) -> None:
        """An iteration did without: what is not tried is believed as its scores say, in the end."""
        self._promises.forget()
        self.budget.earn()
