"""Who decides on a shape: the argmax against three nested loops, at the prices of now."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.engine.budget import Budget
from yggdrasil.engine.drafted_trees import DepthEvidence, DraftedTrees
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.engine.policy import PLAIN_POLICY, Decision, FixedPolicy
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.evidence import EvidenceSizes
from yggdrasil.tree.objective import CLEARLY_BETTER
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.step_costs import StepCosts

MAX_DEPTH, DRAFT_WIDTHS, VERIFY_WIDTHS, HIDDEN_SIZE = 4, (1, 2, 4), (1, 2, 4, 8), 6


def test_gains_are_counted_at_the_speed_of_now():
    ratios, survival = made_up_tables(3)
    slower, usual = (ObjectivePolicy({100: flat_costs(1.0)}, ratios, survival, None) for _ in range(2))
    for policy in (slower, usual):
        for _ in range(20):
            policy.settle(Decision(PLAIN_STEP), 1, 4.0 if policy is slower else 1.0, rested=True)
        tree = Decision(TreeShape(1, 1, 2), 2.0, 8.0)
        for _ in range(5):
            policy.settle(tree, 3, 8.0, rested=False)  # 2 plain steps when slow, else 8

    assert slower.rest(100) is None
    assert usual.rest(100) is not None


def test_the_first_step_behind_a_prefill_only_bounds_the_price_of_plain_steps():
    policy = ObjectivePolicy({100: flat_costs(1.0)}, {}, np.empty(0, dtype=np.float32), None)
    promised = []
    for _ in range(4):
        policy.begin()
        policy.settle(policy.rest(100), 1, 2.0, rested=True)
        promised.append(policy.rest(100).milliseconds)
        policy.settle(policy.rest(100), 1, 1.25, rested=True)
    assert promised == [1.0, 1.25, 1.25, 1.25]


class GivenEvidence:
    """A hidden state at a context length; counts what it is asked for."""

    def __init__(self, context, hidden=None, head=None):
        self.context, self.asked = context, []
        self._values = {"hidden": hidden, "repetition": np.zeros(6, dtype=np.float32), "head": head}

    def hidden(self):
        return self._give("hidden")

    def repetition(self):
        return self._give("repetition")

    def head(self):
        return self._give("head")

    def _give(self, name):
        self.asked.append(name)
        return self._values[name]


def begin_past_samples(policy):
    """Past the cold step and the warm one that sample the price of plain steps."""
    policy.learner.begin()
    for _ in range(2):
        sample = policy.rest(1)
        policy.settle(sample, 1, sample.milliseconds, rested=True)


def test_plain_and_fixed_policies_always_say_the_same():
    plain, fixed = PLAIN_POLICY, FixedPolicy(TreeShape(2, 3, 8))
    for context in (1, 500):
        evidence = GivenEvidence(context)
        assert plain.rest(context).shape == PLAIN_STEP  # never asked for more
        assert fixed.rest(context) is None
        assert fixed.choose(evidence).shape == TreeShape(2, 3, 8)
        assert fixed.prune(TreeShape(2, 1, 8), [1.0, 1.5, 1.6, 1.6], context).shape == TreeShape(2, 1, 8)
        assert evidence.asked == []


# ==== the argmax ====


@st.composite
def step_costs(draw):
    milliseconds = st.floats(0.05, 3.0)
    verify_ms = sorted(draw(st.lists(milliseconds, min_size=4, max_size=4)))
    return StepCosts(
        head_ms=draw(milliseconds),
        draft_ms={width: draw(milliseconds) for width in DRAFT_WIDTHS},
        verify_ms=dict(zip(VERIFY_WIDTHS, verify_ms, strict=True)),
        overhead_ms=draw(milliseconds),
        plain_ms=draw(milliseconds),
    )


def made_up_tables(seed):
    random = np.random.default_rng(seed)
    shape = (MAX_DEPTH, MAX_DEPTH, len(VERIFY_WIDTHS))
    ratios = {width: random.uniform(0, 1.5, shape).astype(np.float32) for width in DRAFT_WIDTHS}
    return ratios, np.sort(random.uniform(0, 1, MAX_DEPTH).astype(np.float32))[::-1].copy()


def made_up_predictor(seed):
    random = np.random.default_rng(seed)
    sizes = {
        "mean": HIDDEN_SIZE, "first_weight": (HIDDEN_SIZE, 5), "first_bias": 5, "second_weight": (5, 5),
        "second_bias": 5, "head_weight": (5, MAX_DEPTH), "head_bias": MAX_DEPTH,
    }  # fmt: skip
    weights = {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    return DepthPredictor(scale=np.ones(HIDDEN_SIZE, dtype=np.float32), **weights)


def worth_of(shape, costs, ratios, survival):
    """Expected tokens a millisecond, summed up level by level."""
    if shape.depth == 0:
        return 1.0 / costs.plain_ms
    column = VERIFY_WIDTHS.index(shape.verify_width)
    tokens = 1.0
    for level in range(len(survival)):
        tokens += float(survival[level]) * float(ratios[shape.width][shape.depth - 1][level][column])
    drafting_ms = costs.head_ms + (shape.depth - 1) * costs.draft_ms[shape.width]
    return tokens / (drafting_ms + costs.verify_ms[shape.verify_width] + costs.overhead_ms)


def best_worth(costs, ratios, survival):
    best = worth_of(PLAIN_STEP, costs, ratios, survival)
    for width in DRAFT_WIDTHS:
        for depth in range(1, MAX_DEPTH + 1):
            for verify_width in VERIFY_WIDTHS:
                best = max(best, worth_of(TreeShape(width, depth, verify_width), costs, ratios, survival))
    return best


@settings(max_examples=200)
@given(step_costs(), st.integers(0, 10_000))
def test_shape_is_the_argmax_of_three_loops(costs, seed):
    """With a predictor and without."""
    ratios, mean_survival = made_up_tables(seed)
    predictor = made_up_predictor(seed)
    hidden = np.random.default_rng(seed + 1).normal(size=HIDDEN_SIZE).astype(np.float32)
    for chosen_predictor in (None, predictor):
        depth = chosen_predictor and DepthEvidence(chosen_predictor, EvidenceSizes(HIDDEN_SIZE, 0, 0))
        policy, evidence = ObjectivePolicy({100: costs}, ratios, mean_survival, depth), GivenEvidence(100, hidden)
        begin_past_samples(policy)
        survival = mean_survival if chosen_predictor is None else predictor.survival(hidden)
        shape, tokens, milliseconds, _ = policy.choose(evidence)

        assert evidence.asked == ([] if chosen_predictor is None else ["hidden"])
        assert worth_of(shape, costs, ratios, survival) == pytest.approx(best_worth(costs, ratios, survival), rel=1e-6)
        assert milliseconds == pytest.approx(costs.iteration_ms(*shape))
        assert tokens / milliseconds == pytest.approx(worth_of(shape, costs, ratios, survival), rel=1e-6)


@settings(max_examples=100)
@given(
    step_costs(),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.integers(0, 10_000),
    st.sampled_from(VERIFY_WIDTHS),
)
def test_less_than_the_planned_width_is_verified_only_where_that_is_clearly_better(costs, gains, seed, planned):
    ratios, survival = made_up_tables(seed)
    expected = np.cumsum(gains) + 1.0
    shape = TreeShape(2, 3, planned)
    policy = ObjectivePolicy({100: costs}, ratios, survival, None)
    pruned, tokens, milliseconds, _ = policy.prune(shape, expected, 100)

    paid_ms = costs.head_ms + 2 * costs.draft_ms[2] + costs.overhead_ms
    worth = {w: tokens / (paid_ms + costs.verify_ms[w]) for w, tokens in zip(VERIFY_WIDTHS, expected, strict=True)}
    assert pruned == shape._replace(verify_width=pruned.verify_width)
    most = max(worth.values())
    wide = max(value for width, value in worth.items() if width >= planned)
    assert worth[pruned.verify_width] == (most if most > CLEARLY_BETTER * wide else wide)
    assert tokens / milliseconds == pytest.approx(worth[pruned.verify_width])


def flat_costs(plain_ms):
    return StepCosts(1.0, dict.fromkeys(DRAFT_WIDTHS, 1.0), dict.fromkeys(VERIFY_WIDTHS, 1.0), 0.0, plain_ms)


def test_costs_of_the_nearest_context_serve():
    ratios, survival = made_up_tables(0)

    nearest = {1: 10.0, 10: 10.0, 500: 10.0, 510: 1000.0, 1000: 1000.0, 9999: 1000.0}
    promises = {}
    for context in nearest:
        policy = ObjectivePolicy({1000: flat_costs(1000.0), 10: flat_costs(10.0)}, ratios, survival, None)
        policy.learner.begin()
        promises[context] = policy.rest(context).milliseconds
    assert promises == nearest


def test_a_tree_that_is_not_worth_its_time_is_a_plain_step():
    """Plain steps are nearly free near the start of the context and never chosen behind it."""
    ratios, survival = made_up_tables(0)
    policy = ObjectivePolicy({10: flat_costs(0.01), 1000: flat_costs(1000.0)}, ratios, survival, None)
    begin_past_samples(policy)
    assert policy.rest(10).shape == PLAIN_STEP
    assert policy.rest(1000) is None
    assert policy.choose(GivenEvidence(1000)).shape.depth > 0


def test_who_reads_evidence_is_asked_until_asking_has_cost_the_budget():
    """A head draft that is always refused costs a plain step each time."""
    ratios, survival = made_up_tables(0)
    depth = DepthEvidence(SurePredictor(), EvidenceSizes(HIDDEN_SIZE, 0, 0))
    policy = ObjectivePolicy({10: flat_costs(0.01)}, ratios, survival, depth, is_head_first=True)
    begin_past_samples(policy)
    evidence, asked = GivenEvidence(10, np.zeros(HIDDEN_SIZE, dtype=np.float32)), 0
    for _ in range(1000):
        resting = policy.rest(10)
        asked += resting is None
        policy.settle(resting or policy.choose(evidence), 1, 0.01 if resting else 0.02, rested=resting is not None)
    assert Budget.GRANT <= asked <= Budget.GRANT + 1000 * Budget.EARNED + 2


def test_a_refusal_after_a_head_draft_promises_what_it_cost():
    ratios, survival = made_up_tables(0)
    refusing = flat_costs(0.01)
    promises = {}
    for is_head_first in (False, True):
        policy = ObjectivePolicy({10: refusing}, ratios, survival, None, is_head_first=is_head_first)
        begin_past_samples(policy)
        promises[is_head_first] = policy.choose(GivenEvidence(10))

    assert promises[False][:3] == (PLAIN_STEP, 1.0, pytest.approx(0.01))
    assert promises[True][:3] == (PLAIN_STEP, 1.0, pytest.approx(1.01))


def test_a_drafter_may_lose_no_more_against_the_free_trees_that_it_takes_the_place_of():
    """It keeps its promise in tokens and beats plain steps, but reads first what every other iteration went past."""
    ratios, survival = made_up_tables(3)
    policy = ObjectivePolicy({100: flat_costs(4.0)}, ratios, np.ones_like(survival), None)
    begin_past_samples(policy)
    drafted = 0
    for iteration in range(1000):
        promised = 1.1 if iteration % 2 else 1.5
        free = policy.free([1.0, promised, promised, promised], MAX_DEPTH, 100)
        if free is None:
            decision = policy.choose(GivenEvidence(100))
            drafted += 1
            policy.settle(decision, round(decision.tokens), 2 * decision.milliseconds, rested=False)
        else:
            policy.settle(free, promised, free.milliseconds, rested=False)
    assert 5 < drafted < 50


def test_a_drafter_that_lost_against_free_trees_is_tried_again_on_the_next_text():
    """But not on this one; and what it loses against plain steps closes it for the next one too."""
    ratios, survival = made_up_tables(3)
    policy = ObjectivePolicy({100: flat_costs(4.0)}, ratios, np.ones_like(survival), None)
    begin_past_samples(policy)

    def drafts(tokens: int, milliseconds: float) -> bool:
        free = policy.free([1.0, 1.5, 1.5, 1.5], MAX_DEPTH, 100)
        if free is None and policy.rest(100) is None:
            policy.settle(policy.choose(GivenEvidence(100)), tokens, milliseconds, rested=False)
            return True
        policy.settle(free or policy.rest(100), 1, 1.0, rested=free is None)
        return False

    tried = [drafts(2, 4.0) for _ in range(60)]  # twice a plain step's tokens, and less than the free trees promise
    assert tried[0]
    assert not any(tried[-20:])
    policy.learner.begin()
    again = [drafts(2, 4.0) for _ in range(60)]
    assert any(again[:3])
    assert sum(again) < sum(tried)
    for _ in range(4):
        policy.learner.begin()
        drafted = [drafts(1, 40.0) for _ in range(40)]
    assert not any(drafted)


def test_a_drafter_has_forgone_nothing_where_no_free_tree_was_looked_at():
    """Drafting that beats plain steps goes on, although it was once preferred to a free tree that promised more."""
    ratios, survival = made_up_tables(3)
    policy = ObjectivePolicy({100: flat_costs(4.0)}, ratios, np.ones_like(survival), None)
    begin_past_samples(policy)
    assert policy.free([1.0, 1.1, 1.1, 1.1], MAX_DEPTH, 100) is None
    for _ in range(50):
        decision = policy.choose(GivenEvidence(100))
        policy.settle(decision, 2, 2.5, rested=False)
    assert policy.rest(100) is None


def test_tokens_below_the_levels_that_a_table_speaks_of_credit_none_of_them():
    """As plans say that were made before trees were compared filled: a deeper tree is not worth more for it."""
    ratios, survival = (
        {1: np.tril(np.ones((MAX_DEPTH, MAX_DEPTH)))[:, :, None].repeat(4, axis=2)},
        np.full(MAX_DEPTH, 0.4),
    )
    costs = StepCosts(1.0, {1: 1.0}, dict.fromkeys(VERIFY_WIDTHS, 1.0), 0.0, 4.0)
    trees = DraftedTrees([costs], ratios, survival, None, "latency")
    deep = TreeShape(1, MAX_DEPTH, 8)
    for _ in range(100):
        trees.settle(TreeShape(1, 1, 8), None, 0, 1 + MAX_DEPTH)
    kept = trees._kept.honest(survival)
    assert kept[0] > 0.9
    assert kept[1:] == pytest.approx(survival[1:])
    assert trees.choosers[0].candidate(deep, kept).tokens < 1 + 0.4 * (MAX_DEPTH - 1) + 1.01


def test_the_ablation_maximises_tokens_alone():
    ratios, survival = made_up_tables(3)
    costs = flat_costs(0.001)  # plain steps are nearly free
    policy = ObjectivePolicy({100: costs}, ratios, survival, None, objective="aal")
    begin_past_samples(policy)
    shape = policy.choose(GivenEvidence(100)).shape
    free = StepCosts(0.0, dict.fromkeys(DRAFT_WIDTHS, 1e-9), dict.fromkeys(VERIFY_WIDTHS, 1.0), 0.0, 1.0)

    assert worth_of(shape, free, ratios, survival) == pytest.approx(best_worth(free, ratios, survival), rel=1e-6)
    assert policy.prune(shape, [1.0, 1.2, 1.2, 1.1], 100).shape.verify_width == 2


def test_promised_times_follow_the_machine_and_so_does_the_choice():
    """Trees four times as slow as calibrated are promised so, and lose against plain steps at the old price."""
    ratios, survival = made_up_tables(3)
    policy = ObjectivePolicy({100: flat_costs(1.5)}, ratios, np.ones_like(survival), None)
    begin_past_samples(policy)
    evidence = GivenEvidence(100)
    drafted = policy.choose(evidence)
    assert drafted.shape.depth > 0
    costs_ms = flat_costs(1.5).iteration_ms(*drafted.shape)
    assert drafted.milliseconds == costs_ms

    for _ in range(60):
        decision = policy.choose(evidence)
        if decision.shape.depth:
            policy.settle(decision, 1, 4 * flat_costs(1.5).iteration_ms(*decision.shape), rested=False)
    assert policy.choose(evidence).shape == PLAIN_STEP
    assert policy.prune(drafted.shape, [1.0, 1.1, 1.2, 1.3], 100).milliseconds > 1.5 * costs_ms


def test_plain_steps_are_promised_at_their_own_pace():
    policy = ObjectivePolicy({100: flat_costs(2.0)}, {}, np.empty(0, dtype=np.float32), None)
    for _ in range(60):
        policy.settle(policy.rest(100), 1, 6.0, rested=True)
    assert policy.rest(100).milliseconds == pytest.approx(6.0, rel=0.01)


class SurePredictor:
    """Says always the same."""

    def survival(self, features):
        return 0.9 ** np.arange(1, MAX_DEPTH + 1)


@pytest.mark.parametrize("predictor", [None, SurePredictor()], ids=["mean", "predictor"])
def test_trees_become_shallow_where_deep_levels_are_not_kept(predictor):
    """Survival of 0.9 a level is believed; of this text one token is right, whatever is drafted, then all is again."""
    costs = StepCosts(0.2, {1: 0.2}, {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2}, 0.05, 1.0)
    ratios = {1: np.tile([0.0, 1.0, 1.0, 1.0], (MAX_DEPTH, 1))}  # the root alone gives nothing
    mean = 0.9 ** np.arange(1, MAX_DEPTH + 1) if predictor is None else np.full(MAX_DEPTH, 0.1)
    depth = predictor and DepthEvidence(predictor, EvidenceSizes(HIDDEN_SIZE, 0, 0))
    policy = ObjectivePolicy({100: costs}, ratios, mean, depth)
    begin_past_samples(policy)

    def depths(count, accepted):
        """Of trees at the price that was promised."""
        for _ in range(count):
            decision = policy.choose(GivenEvidence(100, np.zeros(HIDDEN_SIZE, dtype=np.float32)))
            tokens = 1 + accepted(decision.shape)
            policy.settle(decision, tokens, decision.milliseconds, rested=False)
            yield decision.shape.depth

    narrow, deep = list(depths(100, lambda shape: 1)), list(depths(100, lambda shape: shape.depth))
    assert (narrow[0], narrow[-1]) == (MAX_DEPTH, 1)
    assert deep[-1] > 1


@pytest.mark.parametrize(("plain_ms", "iterations"), [(1.0, 200), (4.0, 1400)])
def test_plain_steps_are_sampled_as_often_as_the_budget_pays_for_them(plain_ms, iterations):
    """Trees make 2 tokens a millisecond: two plain steps cost 2 plain steps, or 14, and 0.01 is earned an iteration."""
    ratios, survival = made_up_tables(3)
    policy = ObjectivePolicy({100: flat_costs(plain_ms)}, ratios, np.ones_like(survival), None)
    begin_past_samples(policy)
    sampled = []
    for iteration in range(4000):
        policy.begin()
        if policy._samples_plain():
            sampled.append(iteration)
            for _ in range(2):
                policy.settle(Decision(PLAIN_STEP), 1, plain_ms, rested=True)
        policy.settle(Decision(TreeShape(1, 1, 2), 2.0, 1.0), 2, 1.0, rested=False)
    assert np.diff(sampled)[-1] == pytest.approx(iterations, rel=0.1)
