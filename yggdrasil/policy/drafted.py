"""What is known of a drafter's trees before one is drafted: how deep they are accepted, and what drafting has lost."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from yggdrasil.policy.acceptance import SurvivalCorrection
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.decision import Decision
from yggdrasil.policy.objective import Candidate, FloatArray, Objective, ShapeTable
from yggdrasil.policy.regret import RegretBudget
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.features import Features, FeatureSizes, read_features

Survival = npt.NDArray[np.float64]


class DepthPrediction(NamedTuple):
    """A depth predictor and the sizes of the features that it reads."""

    predictor: DepthPredictor
    sizes: FeatureSizes


class DraftedTrees:
    """Shapes of a drafter's trees at each of ``costs``, for the survival that their levels have now.

    Without a predictor the calibration's mean survival stands for a prediction; either is corrected by what trees had
    accepted. ``added_tokens``: tokens that a drafter adds where model-free drafts expect none; None: a typical tree
    gives the same whatever they expect.

    ``budget`` is what drafting may lose against plain steps.
    """

    _TYPICAL_EVERY = 16  # iterations, between two looks at which tree is typically best

    def __init__(
        self,
        costs: Sequence[StepCosts],
        ratios: Mapping[int, FloatArray],
        mean_survival: FloatArray,
        depth: DepthPrediction | None,
        objective: Objective,
        added_tokens: float | None,
    ) -> None:
        self._tables = [ShapeTable(each, ratios, objective) for each in costs]
        self._mean_survival = np.asarray(mean_survival, dtype=np.float64)  # [D]
        self._depth, self._added_tokens = depth, added_tokens
        self._correction = SurvivalCorrection(len(self._mean_survival))
        self.budget = RegretBudget()
        self._iterations = 0
        self._typical: list[Candidate] = self._find_typical()

    @property
    def reads_features(self) -> bool:
        """Whether the depth is predicted."""
        return self._depth is not None

    def begin(self) -> None:
        """A request begins."""
        self.budget.begin()

    def typically(self, here: int, model_free: Decision | None) -> Candidate:
        """The tree that is best at the survival of now, and its tokens where ``model_free`` could be verified alone.

        A drafted tree holds those drafts too. So it gives their tokens and what drafting adds: the less, the surer
        they are.
        """
        tree = self._typical[here]
        if model_free is None or self._added_tokens is None:
            return tree
        shape = tree.shape._replace(verify_width=max(tree.shape.verify_width, model_free.shape.verify_width))
        return Candidate(shape, model_free.tokens + self._added_tokens / model_free.tokens, tree.value)

    def best(self, features: Features, here: int) -> tuple[Candidate, Survival | None]:
        """The best tree for the survival that ``features`` predict, and that prediction [D], where there is one."""
        if self._depth is None:
            return self._typical[here], None
        predicted = self._depth.predictor.survival(read_features(features, self._depth.sizes))
        survival = np.asarray(predicted, dtype=np.float64)
        return self._tables[here].best_tree(self._correction.corrected(survival)), survival

    def settle(self, decision: Decision, here: int, tokens: int, gained: float) -> None:
        """An iteration gave ``tokens``, ``gained`` more than plain steps would have in its time."""
        if not decision.is_drafting:
            self._correction.decay()
            self.budget.earn()
        else:
            self.budget.settle(gained)
            if decision.shape.verify_width > 1:
                survival = self._mean_survival if decision.survival is None else decision.survival
                levels = self._tables[here].level_ratios(decision.shape)
                estimated = [share * ratio for share, ratio in zip(survival.tolist(), levels, strict=False)]
                self._correction.observe(estimated, tokens - 1)
        self._iterations += 1
        if self._iterations % self._TYPICAL_EVERY == 0:
            self._typical = self._find_typical()

    def _find_typical(self) -> list[Candidate]:
        survival = self._correction.corrected(self._mean_survival)
        return [table.best_tree(survival) for table in self._tables]

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain data."""
        return {"survival": self._correction.state(), "budget": self.budget.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        self._correction.restore(state["survival"])
        self.budget.restore(state["budget"])
        self._typical = self._find_typical()
