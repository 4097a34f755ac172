"""Belief about trees that cost drafting: how deep they are accepted, before they are drafted."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from yggdrasil.engine.budget import Budget
from yggdrasil.engine.policy import Decision
from yggdrasil.engine.promises import KeptLift, KeptSurvival
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.evidence import Evidence, EvidenceSizes, read_evidence
from yggdrasil.tree.objective import Candidate, Objective, ShapeChooser
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.step_costs import StepCosts

FloatArray = npt.NDArray[np.float32]
Survival = npt.NDArray[np.float64]


class DepthEvidence(NamedTuple):
    """A depth predictor and what it reads."""

    predictor: DepthPredictor
    sizes: EvidenceSizes


class DraftedTrees:
    """Shapes of a drafter's trees at each of ``costs``, as survival is now.

    Without a predictor the mean survival of the calibration stands in for the prediction. Either is corrected by what
    trees have kept. ``lift``: what a drafter adds to other guesses where they promise nothing; unknown, a typical tree
    is worth the same whatever they promise.

    ``budget`` is what drafting may lose against plain steps, ``rivalry`` against the guesses that it was preferred to.
    The latter were calibrated too: a text on which they win says little of the next, so every request opens it again.
    """

    _RECONSIDERED_EVERY = 16  # iterations: the typical tree, which changes when another promises to be _BETTER
    _BETTER = 1.03

    def __init__(
        self,
        costs: Sequence[StepCosts],
        ratios: Mapping[int, FloatArray],
        mean_survival: FloatArray,
        depth: DepthEvidence | None,
        objective: Objective,
        lift: float | None = None,
    ) -> None:
        self.budget, self.rivalry = Budget(), Budget()
        self._depth = depth
        self.choosers = [ShapeChooser(cost, ratios, objective) for cost in costs]
        self._mean_survival = np.asarray(mean_survival, dtype=np.float64)
        self._mean_levels: list[float] = self._mean_survival.tolist()
        self._kept = KeptSurvival(len(self._mean_survival))
        self._iterations = 0
        self._lift, self._kept_lift = lift, KeptLift()
        self.typical = [chooser.best_tree(self._mean_survival) for chooser in self.choosers]

    def use(self, costs: Sequence[StepCosts]) -> None:
        """Decide by other costs of the same places."""
        survival = self._kept.honest(self._mean_survival)
        for place, (chooser, cost) in enumerate(zip(self.choosers, costs, strict=True)):
            chooser.use(cost)
            self.typical[place] = chooser.best_tree(survival)

    def begin(self) -> None:
        """A new request."""
        self.budget.begin()
        self.rivalry.begin()
        self.rivalry.renew()

    def best(self, evidence: Evidence, place: int) -> tuple[Candidate, Survival | None]:
        """The tree that is worth most and the prediction that says so, where there is one."""
        if self._depth is None:
            return self.typical[place], None
        features = read_evidence(evidence, self._depth.sizes)
        believed = np.asarray(self._depth.predictor.survival(features), dtype=np.float64)
        return self.choosers[place].best_tree(self._kept.honest(believed)), believed

    def typically(self, place: int, beside: Decision | None) -> tuple[TreeShape, float]:
        """The typical tree and its tokens, where guesses that cost no pass promise what ``beside`` says.

        A tree holds those guesses too, and is as wide as theirs at least. So it gives their tokens and what drafting
        adds: the less, the surer they are.
        """
        tree = self.typical[place]
        if beside is None or self._lift is None:
            return tree.shape, tree.tokens
        width, depth, verify_width = tree.shape
        shape = TreeShape(width, depth, max(verify_width, beside.shape.verify_width))
        return shape, beside.tokens + self._lift * self._kept_lift.kept / beside.tokens

    def settle(
        self, shape: TreeShape, believed: Survival | None, place: int, tokens: int, beside: float | None = None
    ) -> None:
        """A verified tree gave ``tokens``, where guesses that cost no pass promised ``beside`` alone."""
        if beside is not None and self._lift is not None:
            self._kept_lift.observe(self._lift / beside, tokens - beside)
        survival = self._mean_levels if believed is None else believed.tolist()
        levels = self.choosers[place].level_ratios(shape)  # deeper ones are not spoken of
        self._kept.observe([share * ratio for share, ratio in zip(survival, levels, strict=False)], tokens - 1)

    def passed(self) -> None:
        """No drafted tree was verified: what is not tried is believed as calibrated, in the end."""
        self._kept.forget()
        self._kept_lift.forget()
        self.budget.earn()
        self.rivalry.earn()

    def reconsider(self) -> None:
        """An iteration is over; now and then the typical trees follow survival."""
        self._iterations += 1
        if self._iterations % self._RECONSIDERED_EVERY:
            return
        survival = self._kept.honest(self._mean_survival)
        for place, chooser in enumerate(self.choosers):
            usual, best = chooser.candidate(self.typical[place].shape, survival), chooser.best_tree(survival)
            self.typical[place] = best if best.worth > self._BETTER * usual.worth else usual
