"""Tree algorithms of other systems on our engine, and ablations of our own, by name.

A verify budget of B means a target pass of width B: the root and B - 1 drafted nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from bench_systems import Continuation

from rivals.drafter import ChosenDrafter
from rivals.eagle2 import Eagle2
from rivals.k_ary import k_ary
from rivals.merged import MergedSequences
from rivals.opt_tree import OptTree
from rivals.protocol import Growth, StaticGrowth
from rivals.rank_acceptance import rank_hits
from rivals.sequence import sequence
from rivals.sequoia import SequoiaTables, choose_size, sequoia
from yggdrasil.acceptance.sampling import GREEDY, SamplingParams
from yggdrasil.compiler.compiled import Backend
from yggdrasil.drafters.draft_model import DraftModel, identity_knots
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.engine import Engine
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy, Policy
from yggdrasil.runtime.passes import fitting
from yggdrasil.tree.shape import TreeShape

MAX_LEVEL_WIDTH = 16  # limit for trees that would draft as many nodes per level as they verify
EAGLE_TOP_K = 10
CALIBRATION_TOKENS = 64


@dataclass(frozen=True)
class Arrangement:
    """One tree: its growth rule (None: Equal-Growth), its shape, and whether scores use the acceptance calibration."""

    growth: Growth | None
    shape: TreeShape
    is_calibrated: bool = False
    policy: Policy | None = None  # None: the fixed shape


class TreeBench:
    """A pair with buffers for every tree up to the largest budget; all trees use the same steps."""

    def __init__(
        self, decoder: Decoder, budgets: Sequence[int], costs: StepCosts, *, backend: Backend | None = None
    ) -> None:
        """Build the steps for verify ``budgets`` from the models, shapes and calibration of ``decoder``.

        ``costs`` are for rules that depend on costs. ``backend`` defaults to the decoder's.

        Raises:
            YggdrasilError: a budget is below 2 or exceeds the context, or there is no draft model.
        """
        source = decoder.assembly
        if not isinstance(source.engine.drafter, DraftModel) or source.drafter is None:
            raise YggdrasilError("trees are grown by a draft model; this decoder has none")
        if not budgets or min(budgets) < 2:
            raise YggdrasilError(f"a verify budget must hold the root and a drafted node, got {list(budgets)}")
        shapes = source.shapes
        if max(budgets) > shapes.max_length:
            raise YggdrasilError(
                f"a verify budget of {max(budgets)} is more than the context holds ({shapes.max_length}); give less"
            )
        self.budgets, self.costs = sorted(budgets), costs
        self.max_depth, self.widths = shapes.max_depth, shapes.draft_widths
        self.knots = source.engine.drafter.knots.clone()
        self.acceptance: tuple[float, ...] | None = None
        spare = (self.max_depth + 1) * max(MAX_LEVEL_WIDTH, EAGLE_TOP_K, self.widths[-1]) + 2 * self.budgets[-1]
        wider = replace(
            shapes,
            verify_widths=tuple(sorted({1, *self.budgets})),
            candidates=min(max(shapes.candidates, EAGLE_TOP_K), source.target.call.vocab_size),
            spare_nodes=spare,
        )
        target, drafter = source.target.loaded, source.drafter.loaded
        assembly = assemble(target, drafter, wider, backend or source.target.backend, knots=self.knots.clone())
        engine = assembly.engine
        assert isinstance(engine.drafter, DraftModel)
        self.drafter: DraftModel = engine.drafter
        self.candidates = wider.candidates
        self._chosen = ChosenDrafter(self.drafter, engine.tree, self.widths)
        engine = Engine(engine.target, self._chosen, engine.tree, wider.verify_widths, engine.max_length)
        self.decoder = Decoder(replace(assembly, engine=engine), decoder.tokenizer, PLAIN_POLICY, decoder.eos_tokens)

    def calibrate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int = CALIBRATION_TOKENS, sampling: SamplingParams = GREEDY
    ) -> tuple[float, ...]:
        """Measure the acceptance by candidate rank, [K], that static trees need, on text that is not evaluated."""
        hits, num_generated = np.zeros(self.candidates, dtype=np.int64), 0
        for prompt in prompts:
            generated = self.decoder.generate(
                prompt, max_new_tokens=num_tokens, ignore_eos=True, speculation=False, sampling=sampling
            ).tokens
            hits += rank_hits(self.drafter, self.decoder.assembly.engine.tree, prompt, generated)
            num_generated += len(generated)  # a full context may end them earlier
        self.acceptance = tuple((hits / max(num_generated, 1)).tolist())
        return self.acceptance

    def arrange(self, arrangement: Arrangement) -> None:
        """Set the tree that the decoder grows from now on."""
        self.drafter.knots.copy_(self.knots if arrangement.is_calibrated else identity_knots())
        self._chosen.growth = arrangement.growth
        self.decoder.policy = arrangement.policy or FixedPolicy(arrangement.shape)


class TreeSystem:
    """One tree as a system to compare; all trees of a bench share its engine."""

    family = "yggdrasil"
    is_plain = False

    def __init__(
        self, name: str, bench: TreeBench, arrangement: Arrangement, sampling: SamplingParams = GREEDY
    ) -> None:
        self.name = name
        self.arrangement = arrangement
        self._bench, self._sampling = bench, sampling

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Continuation:
        self._bench.arrange(self.arrangement)
        self._bench.decoder.forget()  # so that every system reads the whole prompt
        generation = self._bench.decoder.generate(
            prompt, max_new_tokens=max_new_tokens, ignore_eos=True, sampling=self._sampling
        )
        metrics = generation.metrics
        decoded = len(generation.tokens) - 1
        return Continuation(generation.tokens, metrics.ttft_ms, metrics.tpot_ms, decoded, metrics.iterations)


def drafting_ms(bench: TreeBench, arrangement: Arrangement) -> float:
    """Return the milliseconds of drafting the whole tree; a rule that stops early takes less."""
    costs, shape, growth = bench.costs, arrangement.shape, arrangement.growth
    if growth is None:
        return costs.drafting_ms(shape.width, shape.depth)
    widest = bench.widths[-1]
    total = costs.head_ms
    for level in growth.widths(shape.depth):
        rest = level % widest
        total += level // widest * costs.draft_ms[widest]
        total += costs.draft_ms[fitting(bench.widths, rest)] if rest else 0.0
    return total


def _static(bench: TreeBench, growth: StaticGrowth, budget: int) -> Arrangement:
    return Arrangement(growth, TreeShape(bench.widths[-1], growth.depth, budget))


def _sequence(bench: TreeBench, budget: int) -> Arrangement:
    return _static(bench, sequence(min(budget - 1, bench.max_depth)), budget)


def _k_ary(bench: TreeBench, budget: int) -> Arrangement:
    return _static(bench, k_ary(2, budget - 1, bench.max_depth), budget)


def _merged(bench: TreeBench, budget: int) -> Arrangement:
    """At least three sequences if the budget allows, as long as possible."""
    length = max(1, min(bench.max_depth, (budget - 1) // 3))
    growth = MergedSequences((budget - 1) // length, length)
    return Arrangement(growth, TreeShape(bench.widths[-1], length, budget))


def _sequoia(bench: TreeBench, budget: int) -> Arrangement:
    return _static(bench, sequoia(_tables(bench, budget), budget), budget)


def _sequoia_by_costs(bench: TreeBench, budget: int) -> Arrangement:
    """Size (at most ``budget``) and depth by the measured costs."""
    tables = _tables(bench, budget)
    costs = bench.costs
    within = replace(costs, verify_ms={w: ms for w, ms in costs.verify_ms.items() if w == 1 or w in bench.budgets})
    choice = choose_size(tables, within, bench.widths)
    growth = StaticGrowth(f"Sequoia, {choice.num_nodes - 1} nodes", tables.tree(choice.num_nodes, choice.depth))
    return _static(bench, growth, choice.num_nodes)


def _opt_tree(bench: TreeBench, budget: int) -> Arrangement:
    """Grow while a level adds any expected acceptance."""
    return _opt_tree_until(bench, budget, 0.0)


def _opt_tree_by_costs(bench: TreeBench, budget: int) -> Arrangement:
    """Grow while a level adds more expected acceptance than its drafting costs, in plain steps."""
    widest = bench.widths[-1]
    steps = -(-min(budget - 1, MAX_LEVEL_WIDTH) // widest)
    return _opt_tree_until(bench, budget, steps * bench.costs.draft_ms[widest] / bench.costs.verify_ms[1])


def _opt_tree_until(bench: TreeBench, budget: int, min_gain: float) -> Arrangement:
    growth = OptTree(budget - 1, min(budget - 1, MAX_LEVEL_WIDTH), min_gain)
    return Arrangement(growth, TreeShape(bench.widths[-1], bench.max_depth, budget))


def _eagle2(bench: TreeBench, budget: int) -> Arrangement:
    growth = Eagle2(budget - 1, min(EAGLE_TOP_K, bench.candidates))
    return Arrangement(growth, TreeShape(bench.widths[-1], bench.max_depth, budget))


def _egt(bench: TreeBench, budget: int) -> Arrangement:
    return Arrangement(None, TreeShape(bench.widths[-1], bench.max_depth, budget), is_calibrated=True)


def _egt_uncalibrated(bench: TreeBench, budget: int) -> Arrangement:
    return replace(_egt(bench, budget), is_calibrated=False)


def _egt_unpruned(bench: TreeBench, budget: int) -> Arrangement:
    """Draft no more nodes than are verified: as many as possible, then as deep as possible."""
    depths = {width: min(bench.max_depth, (budget - 1) // width) for width in bench.widths if width < budget}
    width, depth = max(depths.items(), key=lambda item: (item[0] * item[1], item[1]))
    return Arrangement(None, TreeShape(width, depth, budget), is_calibrated=True)


def _tables(bench: TreeBench, budget: int) -> SequoiaTables:
    if bench.acceptance is None:
        raise YggdrasilError("a static tree needs measured acceptance; give prompts to calibrate it on")
    return SequoiaTables(bench.acceptance, budget, bench.max_depth)


TREES: dict[str, Callable[[TreeBench, int], Arrangement]] = {
    "sequence": _sequence,
    "k-ary": _k_ary,
    "merged": _merged,
    "sequoia": _sequoia,
    "sequoia-by-costs": _sequoia_by_costs,
    "opt-tree": _opt_tree,
    "opt-tree-by-costs": _opt_tree_by_costs,
    "eagle-2": _eagle2,
    "egt": _egt,
    "egt-uncalibrated": _egt_uncalibrated,
    "egt-unpruned": _egt_unpruned,
}


def check_names(names: Sequence[str]) -> None:
    """Raise YggdrasilError if a name is not in ``TREES``."""
    unknown = [name for name in names if name not in TREES]
    if unknown:
        raise YggdrasilError(f"there is no tree {unknown[0]!r}; choose from {', '.join(TREES)}")


def tree_systems(
    bench: TreeBench, names: Sequence[str], budgets: Sequence[int], sampling: SamplingParams = GREEDY
) -> list[TreeSystem]:
    """Return the named trees at each budget, as systems named "NAME B".

    Raises:
        YggdrasilError: a name is unknown.
    """
    check_names(names)
    pairs = dict.fromkeys((name, budget) for budget in budgets for name in names)
    return [TreeSystem(f"{name} {budget}", bench, TREES[name](bench, budget), sampling) for name, budget in pairs]


__all__ = ["TREES", "Arrangement", "TreeBench", "TreeSystem", "drafting_ms", "tree_systems"]
