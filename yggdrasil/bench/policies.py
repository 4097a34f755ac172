"""Policies for comparisons only."""

from collections.abc import Sequence

from yggdrasil.engine.policy import FloatArray
from yggdrasil.tree.objective import StepCosts, TreeShape, choose_verify_width


class PrunedPolicy:
    """One width and depth for every iteration; the verify width by the objective, once the tree is drafted."""

    needs_hidden = False

    def __init__(self, shape: TreeShape, costs: StepCosts) -> None:
        self._shape, self._costs = shape, costs

    def begin(self) -> None:
        return

    def choose(self, hidden: FloatArray | None, context: int) -> TreeShape:
        return self._shape

    def choose_verify_width(self, shape: TreeShape, expected: Sequence[float], context: int) -> int:
        return choose_verify_width(expected, self._costs.drafting_ms(shape.width, shape.depth), self._costs)

    def predict_ms(self, shape: TreeShape, context: int) -> float:
        return self._costs.iteration_ms(*shape)

    def observe(self, shape: TreeShape, expected: float, tokens: int) -> None:
        return

    def settle(self, shape: TreeShape, tokens: int, milliseconds: float) -> None:
        return
