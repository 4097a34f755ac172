"""Online acceptance estimates: correction factors of tree scores and of a drafter's survival by level.

Scores are products of calibrated probabilities. They assume that edges are independent and that every text is like the
calibration's. Some texts are accepted more often, some less, so a correction factor, kept across requests, tracks the
ratio of accepted to estimated tokens. Both are moving averages with a prior of ``PRIOR`` correct estimates.

Dims: D depth levels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import Candidate, Decision, FloatArray, Objective, ShapeTable
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.features import Features, FeatureSizes, read_features

DECAY = 0.98  # factor of the moving averages per iteration
PRIOR = 4.0  # tokens, or trees, with a correct estimate: the weight of the prior
_TINY = 1e-9  # avoids division by zero


class AcceptanceCorrection:
    """Correction factor of a tree's expected accepted tokens."""

    def __init__(self) -> None:
        self._estimated = self._accepted = 0.0
        self.factor = 1.0

    def observe(self, estimated: float, accepted: float) -> None:
        """Update the factor by a tree's accepted tokens and its scores' estimate, both without the bonus token."""
        self._estimated = DECAY * self._estimated + estimated
        self._accepted = DECAY * self._accepted + accepted
        self.factor = (self._accepted + PRIOR) / (self._estimated + PRIOR)

    def decay(self) -> None:
        """Count an iteration without such a tree, by which the factor moves towards 1."""
        self.observe(0.0, 0.0)

    def corrected(self, tokens: float) -> float:
        """Return ``tokens``, the scores' estimate, corrected. Both include the bonus token."""
        return 1.0 + max(tokens - 1.0, 0.0) * self.factor

    def state(self) -> dict[str, Any]:
        """Return the online estimates as plain data."""
        return {"estimated": self._estimated, "accepted": self._accepted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the estimates that ``state`` returned."""
        self._estimated, self._accepted = state["estimated"], state["accepted"]
        self.factor = (self._accepted + PRIOR) / (self._estimated + PRIOR)


class SurvivalCorrection:
    """Correction factor of the survival of each level of a drafter's trees.

    The averages are plain lists, because they are updated between passes and numpy calls would take longer.
    """

    def __init__(self, max_depth: int) -> None:
        self._estimated, self._accepted = [0.0] * max_depth, [0.0] * max_depth

    def observe(self, estimated: Sequence[float], accepted: int) -> None:
        """Update the averages by a drafted tree.

        ``estimated`` [<= D] is the estimated probability that it is accepted at least to each level, ``accepted`` its
        number of accepted tokens without the bonus token.
        """
        self.decay()
        for level, share in enumerate(estimated):
            self._estimated[level] += share
            self._accepted[level] += level < accepted

    def decay(self) -> None:
        """Count an iteration without such a tree, by which the correction decays."""
        self._estimated = [DECAY * share for share in self._estimated]
        self._accepted = [DECAY * share for share in self._accepted]

    def corrected(self, survival: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """Return the corrected ``survival`` [D], clipped to be at most 1 and not to rise with the level."""
        prior = PRIOR * survival
        kept: npt.NDArray[np.float64] = survival * (self._accepted + prior) / (self._estimated + prior + _TINY)
        return np.minimum.accumulate(np.minimum(kept, 1.0))

    def state(self) -> dict[str, Any]:
        """Return the online estimates as plain data."""
        return {"estimated": list(self._estimated), "accepted": list(self._accepted)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the estimates that ``state`` returned."""
        self._estimated, self._accepted = list(state["estimated"]), list(state["accepted"])


class DepthPrediction(NamedTuple):
    """A depth predictor and the sizes of its input features."""

    predictor: DepthPredictor
    sizes: FeatureSizes


class DraftedTrees:
    """Chooser of the best shape of a drafter's trees, for each of ``costs`` and the present survival by level.

    The survival comes from the depth predictor, or without one from the calibration's mean, and is corrected online.
    ``added_tokens`` is the number of tokens that the drafter adds to model-free drafts that expect none. If it is None,
    a typical tree has the same expected tokens with any model-free drafts.
    """

    _TYPICAL_EVERY = 16  # iterations between updates of the typically best trees

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
        self._iterations = 0
        self._typical: list[Candidate] = self._find_typical()

    @property
    def reads_features(self) -> bool:
        """Return whether a depth predictor is used."""
        return self._depth is not None

    def typically(self, here: int, model_free: Decision | None) -> Candidate:
        """Return the best tree at the present mean survival, with its expected tokens.

        A drafted tree also contains the model-free drafts. If ``model_free`` could be verified alone, the expected
        tokens are its own plus those that drafting adds, which are fewer the more ``model_free`` expects.

        Args:
            here: index of the costs in use.
        """
        tree = self._typical[here]
        if model_free is None or self._added_tokens is None:
            return tree
        shape = tree.shape._replace(verify_width=max(tree.shape.verify_width, model_free.shape.verify_width))
        return Candidate(shape, model_free.tokens + self._added_tokens / model_free.tokens, tree.value)

    def best(self, features: Features, here: int) -> tuple[Candidate, npt.NDArray[np.float64] | None]:
        """Return (best tree, predicted survival [D]) for ``features``; the survival is None without a predictor."""
        if self._depth is None:
            return self._typical[here], None
        predicted = self._depth.predictor.survival(read_features(features, self._depth.sizes))
        survival = np.asarray(predicted, dtype=np.float64)
        return self._tables[here].best_tree(self._correction.corrected(survival)), survival

    def settle(self, decision: Decision, here: int, tokens: int) -> None:
        """Update the estimates by an iteration that committed ``tokens`` tokens."""
        if not decision.is_drafting:
            self._correction.decay()
        elif decision.shape.verify_width > 1:
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
        """Return the online estimates as plain data."""
        return self._correction.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the estimates that ``state`` returned."""
        self._correction.restore(state)
        self._typical = self._find_typical()
