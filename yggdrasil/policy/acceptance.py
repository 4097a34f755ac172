"""Acceptance estimates, followed online: of trees by what the last ones had accepted, of a drafter's before it drafts.

Scores are products of calibrated probabilities, as if edges were independent and every text like the calibration's. On
one kind of text they estimate too little, on another too much; a correction factor, kept across requests, follows it.
Both sides of it are moving averages that begin with a few tokens in which the estimate was right.

Dims: D depth levels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import Candidate, Decision, FloatArray, Objective, ShapeTable
from yggdrasil.policy.regret import RegretBudget
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.features import Features, FeatureSizes, read_features

DECAY = 0.98  # of the moving averages, an iteration
PRIOR = 4.0  # tokens, or trees, in which the estimate was right before any was seen
_TINY = 1e-9  # nothing is divided by zero


class AcceptanceCorrection:
    """Correction factor of the tokens that the scores of a tree expect."""

    def __init__(self) -> None:
        self._estimated = self._accepted = 0.0
        self.factor = 1.0

    def observe(self, estimated: float, accepted: float) -> None:
        """A tree had ``accepted`` tokens accepted where its scores expected ``estimated``, both without the bonus."""
        self._estimated = DECAY * self._estimated + estimated
        self._accepted = DECAY * self._accepted + accepted
        self.factor = (self._accepted + PRIOR) / (self._estimated + PRIOR)

    def decay(self) -> None:
        """Count an iteration without such a tree: the factor returns to 1."""
        self.observe(0.0, 0.0)

    def corrected(self, tokens: float) -> float:
        """Return the tokens to expect, bonus included, where the scores say ``tokens``."""
        return 1.0 + max(tokens - 1.0, 0.0) * self.factor

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain data."""
        return {"estimated": self._estimated, "accepted": self._accepted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self._estimated, self._accepted = state["estimated"], state["accepted"]
        self.factor = (self._accepted + PRIOR) / (self._estimated + PRIOR)


class SurvivalCorrection:
    """Correction factor of the survival of each level of a drafter's trees.

    Plain lists hold the averages: they change in every iteration, and a pass waits for it.
    """

    def __init__(self, max_depth: int) -> None:
        self._estimated, self._accepted = [0.0] * max_depth, [0.0] * max_depth

    def observe(self, estimated: Sequence[float], accepted: int) -> None:
        """A tree whose levels were estimated to survive with ``estimated`` [<= D] had ``accepted`` tokens accepted."""
        self.decay()
        for level, share in enumerate(estimated):
            self._estimated[level] += share
            self._accepted[level] += level < accepted

    def decay(self) -> None:
        """Count an iteration without such a tree: the correction fades."""
        self._estimated = [DECAY * share for share in self._estimated]
        self._accepted = [DECAY * share for share in self._accepted]

    def corrected(self, survival: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """Return the survival [D] to expect where ``survival`` [D] is estimated; it never rises with the level."""
        prior = PRIOR * survival
        kept: npt.NDArray[np.float64] = survival * (self._accepted + prior) / (self._estimated + prior + _TINY)
        return np.minimum.accumulate(np.minimum(kept, 1.0))

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain data."""
        return {"estimated": list(self._estimated), "accepted": list(self._accepted)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self._estimated, self._accepted = list(state["estimated"]), list(state["accepted"])


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

    def best(self, features: Features, here: int) -> tuple[Candidate, npt.NDArray[np.float64] | None]:
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
        """Restore what ``state`` returned."""
        self._correction.restore(state["survival"])
        self.budget.restore(state["budget"])
        self._typical = self._find_typical()
