"""The objective of every decision (equation 3 of the paper) and its argmax over tree shapes.

    speedup = AAL * T_verify(1) / (T_draft + T_verify(W_v) + T_overhead)

Dims: D depth levels, V verify widths, N tree shapes. All times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from yggdrasil.policy.costs import Kind, StepCosts
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.features import Features, FeatureSizes, read_features
from yggdrasil.tree.shape import TreeShape

# Trees with low scores are accepted up to this factor more often than estimated.
UNDERESTIMATE = 2.0
Objective: TypeAlias = Literal["latency", "aal"]
FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
Number = TypeVar("Number", float, npt.NDArray[np.float64])


def objective_value(tokens: Number, milliseconds: Number, objective: Objective = "latency") -> Number:
    """Return the value of an iteration that decisions maximise, or an array of the values of many.

    Args:
        tokens: expected tokens, bonus token included.
        milliseconds: expected time of drafting, the target's pass and overhead.
        objective: ``"latency"``: tokens per millisecond, which is equation 3's speed-up without the factor T_verify(1);
            ``"aal"`` (average accepted length): ``tokens`` itself.
    """
    return tokens / milliseconds if objective == "latency" else tokens


def least_useful_probability(costs: Iterable[StepCosts]) -> float:
    """Return the probability of a node's path below which verifying the node costs more time than it can save.

    The cost of one more row, in plain steps, is the smallest slope of a pass's time over its width, divided by the time
    of a plain step. The result is half of this cost, because nodes with low scores are accepted up to twice as often as
    estimated. It is 0 if no context has two verify widths with different times.

    Args:
        costs: step costs at each measured context length.
    """
    slopes = [
        objective_value((each.verify_ms[wide] - each.verify_ms[narrow]) / (wide - narrow), each.plain_ms)
        for each in costs
        for narrow, wide in pairwise({each.verify_ms[width]: width for width in each.verify_widths}.values())
    ]
    return min(slopes, default=0.0) / UNDERESTIMATE


class Decision(NamedTuple):
    """The tree shape of one iteration, with the iteration's expected tokens and milliseconds (0 if not known)."""

    shape: TreeShape
    tokens: float = 1.0  # expected, bonus token included
    milliseconds: float = 0.0
    is_drafting: bool = False  # features were read or the head draft ran, even if the shape is a plain step
    # Tokens that model-free drafts alone are expected to give, before the acceptance correction if the tree has only
    # model-free drafts, after it if the tree is drafted.
    estimated: float = 1.0
    rate_without: float = 0.0  # for a drafted tree: expected tokens a millisecond without the drafter; 0 if not known

    @property
    def kind(self) -> Kind:
        """Kind of iteration, "plain", "model_free" or "drafted", which selects regret budget and latency scale."""
        if self.is_drafting:
            return "drafted"
        return "model_free" if self.shape.depth else "plain"


class ModelFree(NamedTuple):
    """A tree of model-free drafts: expected tokens at each verify width, bonus token included, and number of levels."""

    expected: Sequence[float]
    depth: int


class PassValues:
    """Objective value of one token at each verify width.

    An iteration at the i-th verify width takes ``milliseconds[i]``: the target's pass and ``other_ms``, which is the
    drafting and the overhead. The value of a tree is its expected tokens times ``values[i]``.
    """

    def __init__(self, costs: StepCosts, other_ms: float, objective: Objective = "latency") -> None:
        self._measured = [other_ms + costs.verify_ms[width] for width in costs.verify_widths]
        self._objective: Objective = objective
        self.milliseconds = list(self._measured)
        self.values = [objective_value(1.0, each, objective) for each in self._measured]

    def scale(self, factors: Sequence[float]) -> None:
        """Recompute times and values from the measured times and the present latency scales.

        Width 1 keeps its measured time.

        Args:
            factors: latency scales, in the order of the verify widths; entries 0 and from V on are not used.
        """
        for index in range(1, len(self._measured)):
            self.milliseconds[index] = milliseconds = self._measured[index] * factors[index]
            self.values[index] = objective_value(1.0, milliseconds, self._objective)

    def best(
        self, expected: Sequence[float], first: int = 0, correction: float = 1.0, most: float = inf
    ) -> tuple[int, float]:
        """Return the index of the verify width with the highest value, and its corrected and limited expected tokens.

        Ties go to the narrower width.

        Args:
            expected: [V] expected tokens at each verify width, bonus token included.
            first: index of the first verify width to consider.
            correction: factor on the expected tokens beyond the bonus token.
            most: upper limit of the expected tokens.
        """
        values, best, likely, highest = self.values, first, 1.0, -1.0
        for index in range(first, len(values)):  # without function calls, because the next pass waits for this
            tokens = 1.0 + (expected[index] - 1.0) * correction
            if tokens > most:
                tokens = most
            if (found := tokens * values[index]) > highest:
                best, likely, highest = index, tokens, found
        return best, likely


class ShapeTable:
    """Argmax of the objective over (width, depth, verify width); the time of every shape is computed once.

    ``ratios[width]`` [D, D, V], indexed by depth, level and verify width, is the survival of a tree shape at a level,
    P(accepted length >= level), over the predicted survival. It depends on the depth, because a tree of fewer draft
    steps has fewer nodes on its early levels, and model-free drafters add nodes below the last level. Verify widths are
    ``costs.verify_widths``.

        AAL(width, depth, W_v | context) = 1 + sum over levels i of survival[i] * ratios[width][depth][i][W_v]

    ``objective="latency"`` maximises AAL per millisecond, ``"aal"`` AAL alone. Ties go to the smaller (width, depth,
    verify width) in that order.

    Raises:
        ValueError: ``ratios`` and ``costs`` are incompatible; the message lists every fault.
    """

    def __init__(self, costs: StepCosts, ratios: Mapping[int, FloatArray], objective: Objective = "latency") -> None:
        _check_table(costs, ratios)
        self.max_depth = next(iter(ratios.values())).shape[0]
        self.shapes: list[TreeShape] = []
        columns: list[FloatArray] = []
        for width in sorted(ratios):
            by_budget = np.asarray(ratios[width], dtype=np.float64)  # [D, D, V]
            for depth in range(1, self.max_depth + 1):
                self.shapes += [TreeShape(width, depth, verify_width) for verify_width in costs.verify_widths]
                columns.append(by_budget[depth - 1])
        self._ratios = np.ascontiguousarray(np.concatenate(columns, axis=1))  # [D, N]
        milliseconds = np.array([costs.iteration_ms(*shape) for shape in self.shapes])
        self._value = objective_value(np.ones_like(milliseconds), milliseconds, objective)  # [N], of a token

    def best_tree(self, survival: FloatArray) -> Decision:
        """Return a decision with the tree shape of the highest objective value and its expected tokens, but no time.

        Args:
            survival: [D]; ``survival[d - 1]`` is P(accepted length >= d).
        """
        # NOTE: a sum over axis 0 adds every column in the same order, so equal shapes tie exactly; BLAS may differ.
        expected = np.add.reduce(self._ratios * survival[:, None], axis=0) + 1.0  # [N]
        best = int((expected * self._value).argmax())
        return Decision(self.shapes[best], float(expected[best]))


def _check_table(costs: StepCosts, ratios: Mapping[int, FloatArray]) -> None:
    unknown = sorted(set(ratios) - set(costs.draft_ms))
    faults = [f"no draft cost for widths {unknown}, only for {sorted(costs.draft_ms)}"] if unknown else []
    depth, num_verify = max(table.shape[0] for table in ratios.values()), len(costs.verify_widths)
    faults += [
        f"ratios[{width}] must be {[depth, depth, num_verify]}, got {list(table.shape)}"
        for width, table in ratios.items()
        if table.shape != (depth, depth, num_verify)
    ]
    if faults:
        raise ValueError("; ".join(faults))


class DepthPrediction(NamedTuple):
    """A depth predictor with the sizes of the parts of its input features."""

    predictor: DepthPredictor
    sizes: FeatureSizes


class DraftedTrees:
    """Choice of the draft model's or head's tree shape that has the highest objective value.

    In all methods, ``here`` is the index into ``costs`` of the nearest context length.

    Args:
        costs: step costs at each measured context length.
        ratios: survival of each shape relative to the predicted survival, by draft width (see ``ShapeTable``).
        mean_survival: [D] P(accepted length >= d), the mean over the calibration's text.
        depth: the depth predictor, or None to use ``mean_survival`` for every tree.
        added_tokens: accepted tokens that the drafter adds if no model-free draft is expected to be accepted. None
            stands for the expected tokens of a typical tree, bonus token excluded.
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
        self._typical = [table.best_tree(survival) for table in self._tables]

    @property
    def reads_features(self) -> bool:
        """Whether ``best`` reads its argument ``features``: whether there is a depth predictor."""
        return self._depth is not None

    def added(self, here: int) -> float:
        """Return the accepted tokens that a typical tree adds if no model-free draft is expected to be accepted."""
        return self._typical[here].tokens - 1.0 if self._added_tokens is None else self._added_tokens

    def typical(self, here: int, model_free: Decision | None, correction: float = 1.0) -> Decision:
        """Return a decision with the best shape for the calibration's mean acceptance, and its expected tokens.

        A drafted tree also contains the model-free drafts. With ``model_free``, the decision has the larger of the two
        verify widths and t + a / t expected tokens, where t is the number of expected tokens of ``model_free`` and a is
        the result of ``added`` times ``correction``.

        Args:
            model_free: the decision to verify model-free drafts alone, or None if there are no such drafts.
            correction: factor on the tokens that drafting adds.
        """
        tree = self._typical[here]
        if model_free is None:
            return tree._replace(tokens=1.0 + (tree.tokens - 1.0) * correction)
        shape = tree.shape._replace(verify_width=max(tree.shape.verify_width, model_free.shape.verify_width))
        return Decision(shape, model_free.tokens + self.added(here) * correction / model_free.tokens)

    def best(self, features: Features, here: int) -> Decision:
        """Return the best shape for ``features`` by the depth predictor, or the typical shape without a predictor."""
        if self._depth is None:
            return self._typical[here]
        predicted = self._depth.predictor.survival(read_features(features, self._depth.sizes))
        return self._tables[here].best_tree(np.asarray(predicted, dtype=np.float64))
