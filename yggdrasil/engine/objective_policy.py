"""The policy of a plan: the argmax of the objective, corrected by what trees and steps have really given."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from yggdrasil.engine.free_trees import FreeTrees
from yggdrasil.engine.gate import Gate
from yggdrasil.engine.policy import Decision, Learner
from yggdrasil.engine.promises import KeptPromises, KeptSurvival, Paces
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.evidence import Evidence, EvidenceSizes, read_evidence
from yggdrasil.tree.objective import PLAIN_STEP, Objective, ShapeChooser, StepCosts, TreeShape, choose_verify_width

FloatArray = npt.NDArray[np.float32]


class DepthEvidence(NamedTuple):
    """A depth predictor and what it reads."""

    predictor: DepthPredictor
    sizes: EvidenceSizes


class ObjectivePolicy:
    """Argmax of latency per token (paper equation 3 plus overhead), per context length, behind a gate.

    ``costs`` maps context lengths to the step costs measured there; the nearest one serves, at the pace that plain
    steps and trees show today. Without a predictor the mean survival of the calibration stands in for the prediction.
    ``is_head_first``: a refused tree has cost a head draft already. Guesses that cost no pass must be
    worth more than the typical tree; ``wants_free=False``: there are none.
    """

    # Requests between two that begin with two plain steps, the first being cold; more where trees gain much.
    _SAMPLED_EVERY, _SAMPLED_SELDOM = 8, 64
    _RECONSIDERED_EVERY = 16  # iterations: the typical tree, which changes when another promises to be _BETTER
    _BETTER = 1.03

    def __init__(
        self,
        costs: Mapping[int, StepCosts],
        ratios: Mapping[int, FloatArray],
        mean_survival: FloatArray,
        depth: DepthEvidence | None,
        objective: Objective = "latency",
        *,
        is_head_first: bool = False,
        wants_free: bool = True,
    ) -> None:
        ordered = {context: costs[context] for context in sorted(costs)}
        self._borders = [(a + b) / 2 for a, b in pairwise(ordered)]
        self._choosers = [ShapeChooser(cost, ratios, objective) for cost in ordered.values()]
        self._plain_ms = [cost.plain_ms for cost in ordered.values()]
        self._mean_survival = np.asarray(mean_survival, dtype=np.float64)
        self._typical_trees = [chooser.best_tree(self._mean_survival) for chooser in self._choosers]
        self._kept_survival = KeptSurvival(len(self._mean_survival))
        self._iterations, self._drafter_lags = 0, False
        self._depth = depth
        self._objective: Objective = objective
        self._is_head_first = is_head_first
        self.wants_free = wants_free
        self._gate, self._free_trees = Gate(), FreeTrees()
        self._paces = Paces()
        self.promises = KeptPromises()
        self._here = 0  # costs of the last context that was asked for
        self._steps = 0  # of this request
        self._unsampled = self._SAMPLED_EVERY  # requests without a warm plain step
        self.learner: Learner | None = self

    def begin(self) -> None:
        self._gate.begin()
        self._free_trees.begin()
        self._steps = 0
        self._unsampled += 1

    def settle(self, decision: Decision, tokens: int, milliseconds: float, *, rested: bool) -> None:
        plain_ms = self._plain_ms[self._here] * self._paces.plain
        is_free = not rested and decision.shape.is_free
        if rested:
            self._gate.rested()
            self._kept_survival.forget()
            is_cold = self._steps == 0
            self._paces.follow_plain(plain_ms, milliseconds, is_cold=is_cold)
            self._unsampled = self._unsampled if is_cold else 0
        elif is_free:
            self._free_trees.settle(tokens, tokens - milliseconds / plain_ms)
            self._paces.follow_free(decision.milliseconds, milliseconds)
        else:  # what was spent before a refusal is speculation's too
            self._gate.settle(tokens - milliseconds / plain_ms)
            if decision.shape.depth and not self._drafter_lags:
                self._paces.follow_tree(decision.milliseconds, milliseconds)
            if decision.shape.verify_width > 1:
                self._gate.drafted()
                believed = self._mean_survival if decision.believed is None else decision.believed
                levels = self._choosers[self._here].level_ratios(decision.shape)
                self._kept_survival.observe(believed[: len(levels)] * levels, tokens - 1)
        if not is_free:
            self._free_trees.passed()
        # The next tree's drafter reads what other guesses went past: no price of every tree.
        self._drafter_lags = is_free or (rested and self._drafter_lags)
        self._steps += 1
        self._iterations += 1
        if self._iterations % self._RECONSIDERED_EVERY == 0:
            self._reconsider()

    def _reconsider(self) -> None:
        """The typical trees, as survival is now."""
        survival = self._kept_survival.honest(self._mean_survival)
        for place, chooser in enumerate(self._choosers):
            usual, best = chooser.candidate(self._typical_trees[place].shape, survival), chooser.best_tree(survival)
            self._typical_trees[place] = best if best.worth > self._BETTER * usual.worth else usual

    def free(self, expected: Sequence[float], depth: int, context: int) -> Decision | None:
        if self._samples_plain():
            return None
        self._here = self._place(context)
        costs = self._choosers[self._here].costs
        least = self._worth_of_drafting(costs, depth + 1)
        return self._free_trees.choose(expected, depth, costs, self._paces.free, self._worth, least)

    def _worth_of_drafting(self, costs: StepCosts, room: int) -> float:
        """Of the typical tree or of a plain step; ``room`` tokens may come."""
        plain = self._worth(1.0, costs.plain_ms * self._paces.plain)
        if not self._gate.is_open:
            return plain
        tree = self._typical_trees[self._here]
        return max(plain, self._worth(min(tree.tokens, room), costs.iteration_ms(*tree.shape) * self._paces.tree))

    def _worth(self, tokens: float, milliseconds: float) -> float:
        return tokens / milliseconds if self._objective == "latency" else tokens

    def _samples_plain(self) -> bool:
        """Whether the next step of this request shows what plain steps cost."""
        every = self._SAMPLED_SELDOM if self._gate.is_full else self._SAMPLED_EVERY
        return self._steps < 2 and self._unsampled > every

    def rest(self, context: int) -> Decision | None:
        self._here = self._place(context)
        if not self._gate.is_paused() and not self._samples_plain():
            return None
        return Decision(PLAIN_STEP, 1.0, self._plain_ms[self._here] * self._paces.plain)

    def choose(self, evidence: Evidence) -> Decision:
        place = self._place(evidence.context)
        chooser = self._choosers[place]
        believed = None if self._depth is None else self._predicted(evidence, self._depth)
        if believed is None:
            tree = self._typical_trees[place]
        else:
            tree = chooser.best_tree(self._kept_survival.honest(believed))
        shape, tokens, _ = chooser.or_plain(tree, self._paces.plain / self._paces.tree)
        milliseconds = chooser.costs.iteration_ms(*shape)
        if shape.depth:
            return Decision(shape, tokens, milliseconds * self._paces.tree, believed)
        self._gate.refused()
        head_ms = chooser.costs.head_ms * self._paces.tree if self._is_head_first else 0.0
        return Decision(shape, tokens, milliseconds * self._paces.plain + head_ms)

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        costs = self._choosers[self._place(context)].costs
        width = self._verify_width(shape, expected, costs)
        if width == 1:  # drafted for nothing
            self._gate.refused()
        pruned = TreeShape(shape.width, shape.depth, width)
        tokens = expected[costs.verify_widths.index(width)]
        return Decision(pruned, tokens, costs.iteration_ms(*pruned) * self._paces.tree)

    def _verify_width(self, shape: TreeShape, expected: Sequence[float], costs: StepCosts) -> int:
        """How many nodes of the drafted tree to verify."""
        drafting_ms = costs.drafting_ms(shape.width, shape.depth)
        return choose_verify_width(expected, drafting_ms, costs, self._objective, planned=shape.verify_width)

    @staticmethod
    def _predicted(evidence: Evidence, depth: DepthEvidence) -> npt.NDArray[np.float64]:
        return np.asarray(depth.predictor.survival(read_evidence(evidence, depth.sizes)), dtype=np.float64)

    def _place(self, context: int) -> int:
        return bisect_left(self._borders, context)
