"""Who decides the shape of the next tree: always this one, never any, or the argmax of the objective.

Every policy answers three questions: the shape to draft (before drafting), the verify width (after it), and what to
learn from the outcome.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.tree.objective import PLAIN_STEP, Objective, ShapeChooser, StepCosts, TreeShape, choose_verify_width

FloatArray = npt.NDArray[np.float32]


class Policy(Protocol):
    """Decides tree shapes for one request."""

    needs_hidden: bool  # whether ``choose`` reads the target's hidden state

    def begin(self) -> None:
        """A new request."""

    def choose(self, hidden: FloatArray | None, context: int) -> TreeShape:
        """Shape for the tree below the last certain token; depth 0 is a plain step."""

    def choose_verify_width(self, shape: TreeShape, expected: Sequence[float], context: int) -> int:
        """Width of verification, given the expected tokens for each admissible width."""

    def predict_ms(self, shape: TreeShape, context: int) -> float:
        """What an iteration of this shape should take; 0 where nothing is known."""

    def observe(self, shape: TreeShape, expected: float, tokens: int) -> None:
        """An iteration gave ``tokens`` where ``expected`` were promised."""

    def settle(self, shape: TreeShape, tokens: int, milliseconds: float) -> None:
        """An iteration emitted ``tokens`` and took so long."""


class PlainPolicy:
    """Speculation off."""

    needs_hidden = False

    def begin(self) -> None:
        return

    def choose(self, hidden: FloatArray | None, context: int) -> TreeShape:
        return PLAIN_STEP

    def choose_verify_width(self, shape: TreeShape, expected: Sequence[float], context: int) -> int:
        return 1

    def predict_ms(self, shape: TreeShape, context: int) -> float:
        return 0.0

    def observe(self, shape: TreeShape, expected: float, tokens: int) -> None:
        return

    def settle(self, shape: TreeShape, tokens: int, milliseconds: float) -> None:
        return


class FixedPolicy:
    """One shape for every iteration: a chain where ``width`` is 1. For comparisons, and without a calibration."""

    needs_hidden = False

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape

    def begin(self) -> None:
        return

    def choose(self, hidden: FloatArray | None, context: int) -> TreeShape:
        return self._shape

    def choose_verify_width(self, shape: TreeShape, expected: Sequence[float], context: int) -> int:
        return self._shape.verify_width

    def predict_ms(self, shape: TreeShape, context: int) -> float:
        return 0.0

    def observe(self, shape: TreeShape, expected: float, tokens: int) -> None:
        return

    def settle(self, shape: TreeShape, tokens: int, milliseconds: float) -> None:
        return


class Gate:
    """Keeps speculation from costing time where it does not pay, and tries again later.

    Acceptance on this text is tracked against what was promised; the promise is scaled by it. When the objective then
    prefers plain steps, it is not even asked for a while: a pause that doubles each time the answer stays the same.

    Beyond promises there is an account of what speculation really gained or lost, in plain steps, at the speed the
    machine has now. In the red, decoding is plain, and each plain step earns a little to try again with: so the loss
    stays near ``_EARNED`` of the time, whatever the plan believes. The account outlives a request.
    """

    _FIRST_PAUSE, _LONGEST_PAUSE = 8, 128
    _MEMORY, _PRIOR = 0.9, 4.0
    _CREDIT, _RICHEST, _EARNED = 2.0, 16.0, 0.015

    def __init__(self, plain_ms: float = 1.0) -> None:
        self._plain_ms = plain_ms
        self._balance = self._CREDIT
        self.begin()

    def settle(self, shape: TreeShape, tokens: int, milliseconds: float) -> None:
        """An iteration took so long and emitted ``tokens``."""
        if shape.depth == 0:
            self._plain_ms += 0.3 * (milliseconds - self._plain_ms)
            gained = self._EARNED
        else:
            gained = tokens - milliseconds / self._plain_ms
        self._balance = min(self._balance + gained, self._RICHEST)

    def begin(self) -> None:
        self._is_first = True
        self._accepted = self._promised = 0.0
        self._pause, self._left = self._FIRST_PAUSE, 0

    @property
    def trust(self) -> float:
        """Factor on promised acceptance, 1 before anything was seen."""
        return float(np.clip((self._accepted + self._PRIOR) / (self._promised + self._PRIOR), 0.2, 1.5))

    def is_paused(self) -> bool:
        """Whether the next step is plain without asking the objective.

        The first of a request is: it tells the machine's speed today.
        """
        if self._is_first or self._balance < 0:
            self._is_first = False
            return True
        if self._left > 0:
            self._left -= 1
            return True
        return False

    def refused(self) -> None:
        """The objective prefers a plain step: pause, and forget half of what spoke against speculation."""
        self._left = self._pause
        self._pause = min(2 * self._pause, self._LONGEST_PAUSE)
        self._accepted, self._promised = self._accepted / 2, self._promised / 2

    def observe(self, promised: float, accepted: float) -> None:
        """An iteration accepted ``accepted`` drafted tokens where ``promised`` were expected."""
        self._accepted = self._MEMORY * self._accepted + accepted
        self._promised = self._MEMORY * self._promised + promised
        self._pause = self._FIRST_PAUSE


class ObjectivePolicy:
    """Argmax of latency per token (paper equation 3 plus overhead), per context length, behind a gate.

    ``costs`` maps context lengths to the step costs measured there; the nearest one serves. Without a predictor the
    mean survival of the calibration stands in for the prediction.
    """

    def __init__(
        self,
        costs: Mapping[int, StepCosts],
        ratios: Mapping[int, FloatArray],
        mean_survival: FloatArray,
        predictor: DepthPredictor | None,
        objective: Objective = "latency",
    ) -> None:
        self.needs_hidden = predictor is not None
        self._costs = {context: costs[context] for context in sorted(costs)}
        contexts = list(self._costs)
        self._borders = [(a + b) / 2 for a, b in pairwise(contexts)]
        self._choosers = [ShapeChooser(cost, ratios, objective) for cost in self._costs.values()]
        self._mean_survival = mean_survival
        self._predictor = predictor
        self._objective: Objective = objective
        self._gate = Gate(next(iter(self._costs.values())).plain_ms)

    def begin(self) -> None:
        self._gate.begin()

    def choose(self, hidden: FloatArray | None, context: int) -> TreeShape:
        if self._gate.is_paused():
            return PLAIN_STEP
        survival = self._mean_survival
        if self._predictor is not None and hidden is not None:
            survival = self._predictor.survival(hidden)
        shape = self._chooser(context).choose(np.minimum(survival * self._gate.trust, 1.0))
        if shape.depth == 0:
            self._gate.refused()
        return shape

    def choose_verify_width(self, shape: TreeShape, expected: Sequence[float], context: int) -> int:
        costs = self._chooser(context).costs
        width = choose_verify_width(expected, costs.drafting_ms(shape.width, shape.depth), costs, self._objective)
        if width == 1:  # drafted for nothing
            self._gate.refused()
        return width

    def predict_ms(self, shape: TreeShape, context: int) -> float:
        return self._chooser(context).costs.iteration_ms(*shape)

    def observe(self, shape: TreeShape, expected: float, tokens: int) -> None:
        self._gate.observe(max(expected - 1.0, 0.0), tokens - 1)

    def settle(self, shape: TreeShape, tokens: int, milliseconds: float) -> None:
        self._gate.settle(shape, tokens, milliseconds)

    def _chooser(self, context: int) -> ShapeChooser:
        return self._choosers[bisect_left(self._borders, context)]
