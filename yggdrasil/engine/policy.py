"""Who decides the shape of the next tree: always this one, never any, or the argmax of the objective.

A policy answers at most three questions an iteration: whether to rest, the shape to draft (before the tree grows), and
what of it to verify (after it). Those that learn from what came of it name a ``learner``.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from yggdrasil.engine.promises import Paces
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.evidence import Evidence, EvidenceSizes, read_evidence
from yggdrasil.tree.objective import PLAIN_STEP, Objective, ShapeChooser, StepCosts, TreeShape, choose_verify_width

FloatArray = npt.NDArray[np.float32]


class Decision(NamedTuple):
    """A shape, and what an iteration of it should give and take; 0 ms where nothing is known of costs."""

    shape: TreeShape
    tokens: float = 1.0  # bonus included
    milliseconds: float = 0.0


class Learner(Protocol):
    """Is told what came of each iteration."""

    def begin(self) -> None:
        """A new request."""

    def observe(self, promised: float, accepted: float) -> None:
        """A verified tree gave ``accepted`` tokens where its scores promised ``promised``, both without the bonus."""

    def settle(self, decision: Decision, tokens: int, milliseconds: float, *, rested: bool) -> None:
        """An iteration by ``decision`` took so long and emitted ``tokens``; ``rested``: no shape was asked for."""


class Policy(Protocol):
    """Decides tree shapes for one request."""

    learner: Learner | None

    def rest(self, context: int) -> Decision | None:
        """A plain step without looking at any evidence, or None to be asked for a shape."""

    def choose(self, evidence: Evidence) -> Decision:
        """Shape for the tree below the last certain token; depth 0 is a plain step."""

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        """``shape`` with the width to verify it at, given the expected tokens for each admissible width."""


class FixedPolicy:
    """One shape for every iteration: a chain where ``width`` is 1. For comparisons, and without a calibration."""

    learner: Learner | None = None

    def __init__(self, shape: TreeShape) -> None:
        self._decision = Decision(shape)

    def rest(self, context: int) -> Decision | None:
        return None if self._decision.shape.depth else self._decision

    def choose(self, evidence: Evidence) -> Decision:
        return self._decision

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        return Decision(shape._replace(verify_width=self._decision.shape.verify_width))


PLAIN_POLICY = FixedPolicy(PLAIN_STEP)  # speculation off


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
    # The first trees after plain steps meet cold caches and sleeping threads; credit lasts until they run warm.
    _CREDIT, _RICHEST, _EARNED = 8.0, 16.0, 0.015
    # The first tree of a request pays for the drafter's reading of the prompt. Beyond that, the machine stood still.
    _WORST = -12.0

    def __init__(self) -> None:
        self._balance = self._CREDIT
        self.begin()

    def rested(self) -> None:
        """A plain step was taken without asking the objective."""
        self._balance = min(self._balance + self._EARNED, self._RICHEST)

    def settle(self, gained: float) -> None:
        """An iteration gave ``gained`` tokens more than plain steps would have in its time."""
        self._balance = min(self._balance + max(gained, self._WORST), self._RICHEST)

    def begin(self) -> None:
        self._is_first = True
        self._accepted = self._promised = 0.0
        self._pause, self._left = self._FIRST_PAUSE, 0

    @property
    def trust(self) -> float:
        """Factor on promised acceptance, 1 before anything was seen."""
        return min(max((self._accepted + self._PRIOR) / (self._promised + self._PRIOR), 0.2), 1.5)

    def is_paused(self) -> bool:
        """Whether the next step is plain without asking the objective.

        The first of a request is: it bounds what a plain step costs today.
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
        """A tree gave ``accepted`` drafted tokens where ``promised`` were expected."""
        self._accepted = self._MEMORY * self._accepted + accepted
        self._promised = self._MEMORY * self._promised + promised
        self._pause = self._FIRST_PAUSE


class DepthEvidence(NamedTuple):
    """A depth predictor and what it reads."""

    predictor: DepthPredictor
    sizes: EvidenceSizes


class ObjectivePolicy:
    """Argmax of latency per token (paper equation 3 plus overhead), per context length, behind a gate.

    ``costs`` maps context lengths to the step costs measured there; the nearest one serves, at the pace that plain
    steps and trees show today. Without a predictor the mean survival of the calibration stands in for the prediction.
    ``is_head_first``: a refused tree has cost a head draft already.
    """

    _SAMPLED_EVERY = 8  # requests; their first step alone is cold

    def __init__(
        self,
        costs: Mapping[int, StepCosts],
        ratios: Mapping[int, FloatArray],
        mean_survival: FloatArray,
        depth: DepthEvidence | None,
        objective: Objective = "latency",
        *,
        is_head_first: bool = False,
    ) -> None:
        ordered = {context: costs[context] for context in sorted(costs)}
        self._borders = [(a + b) / 2 for a, b in pairwise(ordered)]
        self._choosers = [ShapeChooser(cost, ratios, objective) for cost in ordered.values()]
        self._plain_ms = [cost.plain_ms for cost in ordered.values()]
        self._mean_survival = mean_survival
        self._depth = depth
        self._objective: Objective = objective
        self._is_head_first = is_head_first
        self._gate = Gate()
        self._paces = Paces()
        self._here = 0  # costs of the last context that was asked for
        self._steps = 0  # of this request
        self._unsampled = self._SAMPLED_EVERY  # requests without a warm plain step
        self.learner: Learner | None = self

    def begin(self) -> None:
        self._gate.begin()
        self._steps = 0
        self._unsampled += 1

    def observe(self, promised: float, accepted: float) -> None:
        self._gate.observe(promised, accepted)

    def settle(self, decision: Decision, tokens: int, milliseconds: float, *, rested: bool) -> None:
        plain_ms = self._plain_ms[self._here] * self._paces.plain
        if rested:
            self._gate.rested()
            is_cold = self._steps == 1
            self._paces.follow_plain(plain_ms, milliseconds, is_cold=is_cold)
            self._unsampled = self._unsampled if is_cold else 0
        else:  # what was spent before a refusal is speculation's too
            self._gate.settle(tokens - milliseconds / plain_ms)
            if decision.shape.depth:
                self._paces.follow_tree(decision.milliseconds, milliseconds)

    def rest(self, context: int) -> Decision | None:
        self._here = self._place(context)
        self._steps += 1
        is_sample = self._steps == 2 and self._unsampled > self._SAMPLED_EVERY
        if not self._gate.is_paused() and not is_sample:
            return None
        return Decision(PLAIN_STEP, 1.0, self._plain_ms[self._here] * self._paces.plain)

    def choose(self, evidence: Evidence) -> Decision:
        chooser = self._choosers[self._place(evidence.context)]
        survival = np.minimum(self._survival(evidence) * self._gate.trust, 1.0)
        shape, tokens = chooser.choose_with_promise(survival, plain_price=self._paces.plain / self._paces.tree)
        milliseconds = chooser.costs.iteration_ms(*shape)
        if shape.depth:
            return Decision(shape, tokens, milliseconds * self._paces.tree)
        self._gate.refused()
        head_ms = chooser.costs.head_ms * self._paces.tree if self._is_head_first else 0.0
        return Decision(shape, tokens, milliseconds * self._paces.plain + head_ms)

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        costs = self._choosers[self._place(context)].costs
        width = choose_verify_width(expected, costs.drafting_ms(shape.width, shape.depth), costs, self._objective)
        if width == 1:  # drafted for nothing
            self._gate.refused()
        pruned = shape._replace(verify_width=width)
        tokens = expected[costs.verify_widths.index(width)]
        return Decision(pruned, tokens, costs.iteration_ms(*pruned) * self._paces.tree)

    def _survival(self, evidence: Evidence) -> FloatArray:
        if self._depth is None:
            return self._mean_survival
        return self._depth.predictor.survival(read_evidence(evidence, self._depth.sizes))

    def _place(self, context: int) -> int:
        return bisect_left(self._borders, context)
