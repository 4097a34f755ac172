"""The policy of every plan: one argmax of the objective over plain steps, guesses that cost no pass, drafted trees."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from yggdrasil.engine.drafted_trees import DepthEvidence, DraftedTrees, FloatArray
from yggdrasil.engine.free_trees import FreeTrees
from yggdrasil.engine.lookout import Lookout
from yggdrasil.engine.machine_speed import MachineSpeed
from yggdrasil.engine.policy import Decision, Learner
from yggdrasil.engine.promises import KeptPromises, Paces, PlainSamples
from yggdrasil.predictor.evidence import Evidence
from yggdrasil.tree.objective import Objective, best_of, worth, worth_by_width
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.stakes import Stakes, stakes_of
from yggdrasil.tree.step_costs import StepCosts


class _Pruning(NamedTuple):
    """What a token is worth at each verify width once a tree is drafted, and what its last guesses go by."""

    weights: list[float]
    stakes: Stakes


class ObjectivePolicy:
    """Does what is worth most (``worth``), within a budget for each way to speculate.

    ``costs`` maps context lengths to the step costs measured there; the nearest one serves, at the pace that passes,
    plain steps and trees show today. ``ratios``, ``mean_survival`` and ``lift`` tell of the drafter's trees
    (``DraftedTrees``); without ratios nothing is drafted that costs a pass. ``is_head_first``: a refused tree has cost
    a head draft already. ``wants_free=False``: there are no guesses that cost none.
    """

    _NOTICED_EVERY, _NOTICED = 16, 0.05  # passes; a change of memory's slowness that costs are made anew for

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
        lift: float | None = None,
    ) -> None:
        ordered = {context: costs[context] for context in sorted(costs)}
        self._borders = [(a + b) / 2 for a, b in pairwise(ordered)]
        self._calibrated = self._costs = list(ordered.values())
        self._speed, self._observed = MachineSpeed(), 0
        self._lookout = Lookout(self._costs)
        self._noticed = 1.0  # the slowness of memory that ``_costs`` are for
        self._drafted = DraftedTrees(self._costs, ratios, mean_survival, depth, objective, lift) if ratios else None
        self._reads_evidence = depth is not None
        self._free_trees = FreeTrees(self._costs, objective)
        self._objective: Objective = objective
        self._is_head_first = is_head_first
        self.wants_free = wants_free
        self._paces, self._samples = Paces(), PlainSamples(self._costs[0].plain_ms)
        self.promises = KeptPromises()
        self._pruning: dict[tuple[int, TreeShape], _Pruning] = {}  # of each place and shape that was drafted
        self._here = 0  # costs of the last context that was asked for
        self._steps = 0  # of this request
        self._drafter_lags = False
        self._forgone: Decision | None = None  # the free tree that a drafted one was preferred to
        self._beside: float | None = None  # tokens that other guesses promise, where that is known
        self.learner: Learner | None = self

    # ==== decisions ====

    def stakes(self, context: int) -> Stakes:
        return self._free_trees.stakes(self._place(context))

    def stakes_beside(self, shape: TreeShape, context: int) -> Stakes:
        stakes = self._pruned(shape, self._place(context)).stakes
        stakes[0] = self.promises.kept
        return stakes

    def free(self, expected: Sequence[float], depth: int, context: int) -> Decision | None:
        self._here = here = bisect_left(self._borders, context)
        self._forgone = self._beside = None
        if expected[-1] <= 1.0:
            self._beside = 1.0
            return None
        if not self._free_trees.budget.is_open:
            return None
        if self._steps < PlainSamples.STEPS and self._samples_plain():
            return None
        best = self._free_trees.best(expected, depth, here, self._paces.free, self._widest(here))
        value = worth(best.tokens, best.milliseconds, self._objective)
        rivals = worth(1.0, self._costs[here].plain_ms * self._paces.plain, self._objective)
        if self._drafted is not None:
            rivals = max(rivals, self._worth_of_drafting(depth + 1.0, best))
            self._forgone, self._beside = best, best.tokens
        return best if value > rivals else None

    def rest(self, context: int) -> Decision | None:
        self._here = self._place(context)
        drafted = self._drafted
        may_draft = drafted is not None and drafted.budget.is_open and not self._samples_plain()
        # A predictor may think better of this place than of a typical one: it is asked.
        if may_draft and (self._reads_evidence or self._worth_of_drafting(inf) > self._worth_of_plain()):
            return None
        return Decision(PLAIN_STEP, 1.0, self._plain_ms)

    def choose(self, evidence: Evidence) -> Decision:
        assert self._drafted is not None, "there is nothing to draft"
        self._here = place = self._place(evidence.context)
        tree, believed = self._drafted.best(evidence, place)
        milliseconds = self._costs[place].iteration_ms(*tree.shape) * self._paces.tree
        if worth(tree.tokens, milliseconds, self._objective) > self._worth_of_plain():
            return Decision(tree.shape, tree.tokens, milliseconds, believed)
        head_ms = self._costs[place].head_ms * self._paces.tree if self._is_head_first else 0.0
        return Decision(PLAIN_STEP, 1.0, self._plain_ms + head_ms)

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        place = self._place(context)
        costs, widest = self._costs[place], self._widest(place)
        best = self._best_width(shape, expected, place)
        if widest is not None:
            best = min(best, costs.verify_widths.index(widest))
        pruned = TreeShape(shape.width, shape.depth, costs.verify_widths[best])
        return Decision(pruned, expected[best], costs.iteration_ms(*pruned) * self._paces.tree)

    def _widest(self, place: int) -> int | None:
        """The most nodes that may be verified now; what passes cost matters to latency alone."""
        return self._lookout.widest(place) if self._objective == "latency" else None

    def _best_width(self, shape: TreeShape, expected: Sequence[float], place: int) -> int:
        """How many nodes of the drafted tree to verify, as the place of it among the widths."""
        return best_of(expected, self._pruned(shape, place).weights)

    def _pruned(self, shape: TreeShape, place: int) -> "_Pruning":
        """What decides how many nodes of a tree drafted as ``shape`` are verified, beside what they promise."""
        if (found := self._pruning.get((place, shape))) is None:
            costs = self._costs[place]
            drafting_ms = costs.drafting_ms(shape.width, shape.depth)
            weights = worth_by_width(drafting_ms, costs, self._objective, shape.verify_width)
            stakes = stakes_of(list(zip(costs.verify_widths, weights, strict=True))[1:])
            found = self._pruning[place, shape] = _Pruning(weights, stakes)
        return found

    def _worth_of_plain(self) -> float:
        return worth(1.0, self._plain_ms, self._objective)

    def _worth_of_drafting(self, room: float, beside: Decision | None = None) -> float:
        """Of the typical tree, ``beside`` what else may be verified; ``room`` tokens may come."""
        if self._drafted is None or not self._drafted.budget.is_open or (beside and not self._drafted.rivalry.is_open):
            return 0.0
        shape, tokens = self._drafted.typically(self._here, beside)
        milliseconds = self._costs[self._here].iteration_ms(*shape) * self._paces.tree
        return worth(min(tokens, room), milliseconds, self._objective)

    @property
    def _plain_ms(self) -> float:
        return self._costs[self._here].plain_ms * self._paces.plain

    def _samples_plain(self) -> bool:
        """Whether the next step shows what plain steps cost."""
        return self._samples.is_due(self._steps, self._plain_ms)

    def _place(self, context: int) -> int:
        return bisect_left(self._borders, context)

    # ==== what came of them ====

    def begin(self) -> None:
        self._free_trees.budget.begin()
        if self._drafted is not None:
            self._drafted.begin()
        self._steps, self._drafter_lags = 0, True

    def settle(
        self, decision: Decision, tokens: int, milliseconds: float, *, rested: bool, pass_ms: float | None = None
    ) -> None:
        if pass_ms is not None and self._steps:  # a request's first pass meets cold caches
            change = self._follow_machine(decision.shape, pass_ms)
            decision, forgone = decision.slowed(change), self._forgone
            self._forgone = None if forgone is None else forgone.slowed(change)
        plain_ms = self._plain_ms
        gained = tokens - milliseconds / plain_ms
        is_free = not rested and decision.shape.is_free
        is_tried = not rested and not is_free
        if is_free:
            self._free_trees.settle(tokens, gained)
            self._paces.follow_free(decision.milliseconds, milliseconds)
        else:
            self._free_trees.passed()
            if rested:
                self._paces.follow_plain(plain_ms, milliseconds, is_cold=self._steps == 0)
        if self._drafted is not None:
            self._settle_drafted(self._drafted, decision, tokens, milliseconds, gained, is_tried=is_tried)
        # The next tree's drafter reads what other guesses went past, and the first the prompt: no price of every tree.
        self._drafter_lags = is_free or (rested and self._drafter_lags)
        self._forgone = self._beside = None
        self._samples.add(tokens, milliseconds)
        if rested and self._steps:
            self._samples.taken()
        self._steps += 1

    def _follow_machine(self, shape: TreeShape, pass_ms: float) -> float:
        """A pass took so long; returns how much slower the machine is believed to be than before it.

        All ways to go on are slower then. What widths cost beside each other is looked at now and then.
        """
        costs, width = self._calibrated[self._here], shape.verify_width
        plain, change = self._speed.observe(costs.read_share(width), pass_ms / costs.verify_ms[width])
        self._paces.scale(plain, change)
        self._lookout.passed(self._here, width)
        self._observed += 1
        if self._observed % self._NOTICED_EVERY == 0:
            self._notice_memory(width)
        return change

    def _notice_memory(self, width: int) -> None:
        """Where its slowness has changed, decide by costs that know; paces stay true of passes of ``width``."""
        memory = self._speed.of_memory
        if abs(memory / self._noticed - 1.0) > self._NOTICED:
            self._noticed = memory
            self._use([each.where_memory_is(memory) for each in self._calibrated], width)

    def _use(self, costs: list[StepCosts], width: int) -> None:
        """Decide by other costs of the same places; paces stay true of passes of ``width``."""
        before, now = (each[self._here].verify_ms[width] for each in (self._costs, costs))
        self._paces.scale(1.0, before / now)
        self._costs = costs
        self._lookout.use(costs)
        self._free_trees.use(costs)
        if self._drafted is not None:
            self._drafted.use(costs)
        self._pruning.clear()

    def _settle_drafted(
        self,
        drafted: DraftedTrees,
        decision: Decision,
        tokens: int,
        milliseconds: float,
        gained: float,
        *,
        is_tried: bool,
    ) -> None:
        shape = decision.shape
        if is_tried:  # what was spent before a refusal is speculation's too
            drafted.budget.settle(gained)
            if self._forgone is not None:
                drafted.rivalry.settle(tokens - milliseconds * self._forgone.tokens / self._forgone.milliseconds)
            if shape.depth and not self._drafter_lags:
                self._paces.follow_tree(decision.milliseconds, milliseconds)
        if is_tried and shape.verify_width > 1:
            drafted.settle(shape, decision.believed, self._here, tokens, self._beside)
        elif not is_tried:
            drafted.passed()
        drafted.reconsider()
