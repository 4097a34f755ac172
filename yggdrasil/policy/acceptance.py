"""Online acceptance estimates: the correction factor of tree scores, and the best shapes of a drafter's trees.

Scores are products of calibrated probabilities. They assume that edges are independent and that every text is like the
calibration's. Some texts are accepted more often, some less, so a correction factor, kept across requests, tracks the
ratio of accepted to estimated tokens. It is a ratio of moving averages with a prior of ``PRIOR`` correct estimates.

Dims: D depth levels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import Candidate, Decision, FloatArray, Objective, ShapeTable
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.features import Features, FeatureSizes, read_features

DECAY = 0.98  # factor of the moving averages per iteration
PRIOR = 4.0  # tokens with a correct estimate: the weight of the prior


class AcceptanceCorrection:
    """Correction factor of a tree's expected accepted tokens: a moving ratio of accepted to estimated tokens."""

    def __init__(self) -> None:
        self._estimated = self._accepted = 0.0
        self.factor = 1.0

    def observe(self, estimated: float, accepted: float) -> None:
        """Update the correction factor by one verified tree. Both counts leave out the bonus token.

        Args:
            estimated: accepted tokens that the scores of the tree's nodes predicted.
            accepted: drafted tokens that the target accepted.
        """
        self._estimated = DECAY * self._estimated + estimated
        self._accepted = DECAY * self._accepted + accepted
        self.factor = (self._accepted + PRIOR) / (self._estimated + PRIOR)

    def decay(self) -> None:
        """Move the correction factor towards 1, for an iteration that verified no model-free tree."""
        self.observe(0.0, 0.0)

    def corrected(self, tokens: float) -> float:
        """Return the expected tokens of a tree after the correction.

        Args:
            tokens: tokens that the scores of the tree's nodes predict. Argument and result count the bonus token.
        """
        return 1.0 + max(tokens - 1.0, 0.0) * self.factor

    def state(self) -> dict[str, Any]:
        """Return the two moving averages behind the correction factor, as plain data for JSON."""
        return {"estimated": self._estimated, "accepted": self._accepted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the moving averages of estimated and accepted tokens to those of ``state``, a result of ``state()``.

        The correction factor is computed from them.

        Raises:
            KeyError: it lacks "estimated" or "accepted".
        """
        self._estimated, self._accepted = state["estimated"], state["accepted"]
        self.factor = (self._accepted + PRIOR) / (self._estimated + PRIOR)


class DepthPrediction(NamedTuple):
    """A depth predictor with the sizes of the parts of its input features."""

    predictor: DepthPredictor
    sizes: FeatureSizes


class DraftedTrees:
    """Choice of the draft model's or head's tree shape that has the highest objective value.

    Args:
        costs: step costs at each measured context length.
        ratios: survival of each shape relative to the predicted survival, by draft width (see ``ShapeTable``).
        mean_survival: [D] P(accepted length >= d), the mean over the calibration's text.
        depth: the depth predictor, or None to use ``mean_survival`` for every tree.
        added_tokens: accepted tokens that the drafter adds to model-free drafts of which none is expected to be
            accepted. None: a typical tree has the same expected tokens with any model-free drafts.
    """

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
        self._depth, self._added_tokens = depth, added_tokens
        survival = np.asarray(mean_survival, dtype=np.float64)  # [D]
        self._typical: list[Candidate] = [table.best_tree(survival) for table in self._tables]

    @property
    def reads_features(self) -> bool:
        """Whether ``best`` reads its argument ``features``: whether there is a depth predictor.

        A depth predictor is a network that predicts P(accepted length >= d) for each depth d from features of the text.
        Without one, the calibration's mean is used for every tree.
        """
        return self._depth is not None

    def typical(self, here: int, model_free: Decision | None) -> Candidate:
        """Return the shape with the highest objective value for a typical tree, with its expected tokens and value.

        Its acceptance by depth is the calibration's mean.

        A drafted tree also contains the model-free drafts. If ``model_free`` could be verified alone, the expected
        tokens are its own plus those that drafting adds, which are fewer the more ``model_free`` expects.

        Args:
            here: index into ``costs``, of the nearest context length.
            model_free: the decision to verify model-free drafts alone, or None without drafts.
        """
        tree = self._typical[here]
        if model_free is None or self._added_tokens is None:
            return tree
        shape = tree.shape._replace(verify_width=max(tree.shape.verify_width, model_free.shape.verify_width))
        return Candidate(shape, model_free.tokens + self._added_tokens / model_free.tokens, tree.value)

    def best(self, features: Features, here: int) -> Candidate:
        """Return the tree shape with the highest objective value for ``features``, with its expected tokens and value.

        Args:
            features: what the depth predictor reads. Without one, they are not used, and a typical tree is returned.
            here: index into ``costs``, of the nearest context length.
        """
        if self._depth is None:
            return self._typical[here]
        predicted = self._depth.predictor.survival(read_features(features, self._depth.sizes))
        return self._tables[here].best_tree(np.asarray(predicted, dtype=np.float64))
