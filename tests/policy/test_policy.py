"""The choice against nested loops, at the costs of now, and what it may lose."""

import json

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.policy.objective import Decision, DepthPrediction, ModelFree
from yggdrasil.policy.policy import ObjectivePolicy, RegretBudget
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.features import FeatureSizes
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

MAX_DEPTH, DRAFT_WIDTHS, VERIFY_WIDTHS, HIDDEN_SIZE = 4, (1, 2, 4), (1, 2, 4, 8), 6
LEVELS = np.tril(np.ones((MAX_DEPTH, MAX_DEPTH)))[:, :, None]  # of each depth budget


class GivenFeatures:
    """A hidden state at a context length; counts its requests."""

    def __init__(self, context, hidden=None, head=None):
        self.context, self.requested = context, []
        self._values = {"hidden": hidden, "repetition": np.zeros(6, dtype=np.float32), "head": head}

    def hidden(self):
        return self._give("hidden")

    def repetition(self):
        return self._give("repetition")

    def head(self):
        return self._give("head")

    def _give(self, name):
        self.requested.append(name)
        return self._values[name]


def new_policy(*arguments, **options):
    """Past two plain steps, the second of which is warm: what they cost is known."""
    policy = ObjectivePolicy(*arguments, **options)
    policy.begin()
    for _ in range(2):
        policy.choose(1)
        policy.observe(Decision(PLAIN_STEP), 1, policy._plain_ms)
    return policy


def choose(policy, context, hidden=None):
    """The decision, with features where it wants them."""
    decision = policy.choose(context)
    return policy.choose(context, features=GivenFeatures(context, hidden)) if decision is None else decision


def test_plain_and_fixed_policies_always_decide_the_same():
    plain, fixed = PLAIN_POLICY, FixedPolicy(TreeShape(2, 3, 8))
    for context in (1, 500):
        assert plain.choose(context).kind == "plain"
        decision = fixed.choose(context)
        assert (decision.shape, decision.kind) == (TreeShape(2, 3, 8), "drafted")
        shallow = decision._replace(shape=TreeShape(2, 1, 4))
        assert fixed.prune(shallow, [1.0, 1.5, 1.6, 1.6], context).shape == TreeShape(2, 1, 8)


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


def value_of(shape, costs, ratios, survival):
    """Expected tokens a millisecond, summed up level by level."""
    if shape.depth == 0:
        return 1.0 / costs.plain_ms
    column = VERIFY_WIDTHS.index(shape.verify_width)
    tokens = 1.0
    for level in range(len(survival)):
        tokens += float(survival[level]) * float(ratios[shape.width][shape.depth - 1][level][column])
    drafting_ms = costs.head_ms + (shape.depth - 1) * costs.draft_ms[shape.width]
    return tokens / (drafting_ms + costs.verify_ms[shape.verify_width] + costs.overhead_ms)


def best_value(costs, ratios, survival):
    best = value_of(PLAIN_STEP, costs, ratios, survival)
    for width in DRAFT_WIDTHS:
        for depth in range(1, MAX_DEPTH + 1):
            for verify_width in VERIFY_WIDTHS:
                best = max(best, value_of(TreeShape(width, depth, verify_width), costs, ratios, survival))
    return best


@examples(200)
@given(step_costs(), st.integers(0, 10_000))
def test_the_shape_is_the_argmax_of_three_loops(costs, seed):
    """With a predictor and without."""
    ratios, mean_survival = made_up_tables(seed)
    predictor = made_up_predictor(seed)
    hidden = np.random.default_rng(seed + 1).normal(size=HIDDEN_SIZE).astype(np.float32)
    for used in (None, predictor):
        depth = used and DepthPrediction(used, FeatureSizes(HIDDEN_SIZE, 0, 0))
        policy = new_policy({100: costs}, ratios, mean_survival, depth)
        survival = mean_survival if used is None else used.survival(hidden)
        decision = choose(policy, 100, hidden)

        value = value_of(decision.shape, costs, ratios, survival)
        assert value == pytest.approx(best_value(costs, ratios, survival), rel=1e-6)
        assert decision.milliseconds == pytest.approx(costs.iteration_ms(*decision.shape))
        assert decision.tokens / decision.milliseconds == pytest.approx(value, rel=1e-6)


@examples(100)
@given(step_costs(), st.lists(st.floats(0, 1), min_size=4, max_size=4), st.floats(0.5, 2.0))
def test_the_verify_width_is_the_argmax_with_model_free_drafts_and_in_a_drafted_tree(costs, gains, slowness):
    expected = (np.cumsum(gains) + 1.0).tolist()
    policy = new_policy({100: costs}, {}, np.empty(0, dtype=np.float32), None)
    values = {w: t / (costs.verify_ms[w] + costs.overhead_ms) for w, t in zip(VERIFY_WIDTHS, expected, strict=True)}
    decision = policy.choose(100, ModelFree(expected, 16))
    found = values[decision.shape.verify_width] if decision.kind == "model_free" else 1.0 / costs.plain_ms
    best = max(value for width, value in values.items() if width > 1) if expected[-1] > 1.0 else 0.0
    assert found == pytest.approx(max(best, 1.0 / costs.plain_ms))

    pruned = policy.prune(Decision(TreeShape(2, 3, 8), is_drafting=True), expected, 100)
    paid_ms = costs.head_ms + 2 * costs.draft_ms[2] + costs.overhead_ms
    values = {w: t / (paid_ms + costs.verify_ms[w]) for w, t in zip(VERIFY_WIDTHS, expected, strict=True)}
    assert pruned.shape == TreeShape(2, 3, pruned.shape.verify_width)
    assert values[pruned.shape.verify_width] == pytest.approx(max(values.values()))
    assert pruned.tokens / pruned.milliseconds == pytest.approx(max(values.values()))


def test_no_more_tokens_are_expected_than_may_come():
    costs = StepCosts(0.0, {}, {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}, overhead_ms=0.1, plain_ms=1.0)
    policy = new_policy({50: costs}, {}, np.empty(0, dtype=np.float32), None)
    assert policy.choose(50, ModelFree([1.0, 1.9, 2.9, 5.0], 1)).shape == TreeShape(0, 1, 2)
    assert policy.choose(50, ModelFree([1.0, 1.9, 2.9, 5.0], 16)).shape == TreeShape(0, 16, 8)
    cheaper = StepCosts(0.0, {}, {1: 0.4, 2: 0.5, 4: 0.7, 8: 1.4}, overhead_ms=0.1, plain_ms=1.0)  # than plain steps
    policy = new_policy({50: cheaper}, {}, np.empty(0, dtype=np.float32), None)
    assert policy.choose(50, ModelFree([1.0, 1.0, 1.0, 1.0], 16)).kind == "plain"


def test_model_free_trees_are_predicted_at_their_present_cost():
    costs = StepCosts(0.0, {}, {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}, overhead_ms=0.1, plain_ms=1.0)
    policy = new_policy({50: costs}, {}, np.empty(0, dtype=np.float32), None)
    tree = ModelFree([1.0, 2.0, 3.0, 9.0], 16)
    for _ in range(60):  # they pay all the same, so that the budget stays open
        policy.observe(policy.choose(50, tree), 9, 3 * 2.1)
    assert policy.choose(50, tree).milliseconds == pytest.approx(3 * 2.1, rel=0.02)


@pytest.mark.parametrize(("rate", "is_drafted"), [(0.1, True), (0.3, True), (0.5, False), (0.9, False)])
def test_drafting_adds_less_where_model_free_drafts_are_sure_already(rate, is_drafted):
    """A drafted tree gives 2 / x tokens more where x are expected without it."""
    verify_ms = {width: 1.0 + 0.1 * (width - 1) for width in VERIFY_WIDTHS}
    costs = StepCosts(0.2, {1: 0.2, 2: 0.2}, verify_ms, 0.1, 1.0)
    of_the_tree = [0.0, 1.0, 1.0, 1.0]  # the root alone gives nothing
    ratios = dict.fromkeys((1, 2), LEVELS * of_the_tree)
    policy = new_policy({100: costs}, ratios, 0.9 ** np.arange(1, MAX_DEPTH + 1), None, added_tokens=2.0)
    expected = [1.0 + sum(rate**level for level in range(1, width)) for width in VERIFY_WIDTHS]
    assert policy.choose(100, ModelFree(expected, 7)).kind == ("drafted" if is_drafted else "model_free")


def flat_costs(plain_ms):
    return StepCosts(1.0, dict.fromkeys(DRAFT_WIDTHS, 1.0), dict.fromkeys(VERIFY_WIDTHS, 1.0), 0.0, plain_ms)


def test_costs_of_the_nearest_context_serve():
    nearest = {1: 10.0, 10: 10.0, 500: 10.0, 510: 1000.0, 1000: 1000.0, 9999: 1000.0}
    found = {}
    for context in nearest:
        policy = ObjectivePolicy({1000: flat_costs(1000.0), 10: flat_costs(10.0)}, {}, np.empty(0), None)
        found[context] = policy.choose(context).milliseconds
    assert found == nearest


def test_a_tree_that_does_not_repay_its_time_is_a_plain_step():
    """Plain steps are nearly free near the start of the context and never chosen behind it."""
    ratios, survival = made_up_tables(0)
    policy = new_policy({10: flat_costs(0.01), 1000: flat_costs(1000.0)}, ratios, survival, None)
    assert policy.choose(10).shape == PLAIN_STEP
    assert policy.choose(1000).kind == "drafted"


class SurePredictor:
    """Predicts always the same."""

    def survival(self, features):
        return 0.9 ** np.arange(1, MAX_DEPTH + 1)


SURE = DepthPrediction(SurePredictor(), FeatureSizes(HIDDEN_SIZE, 0, 0))
HERE = np.zeros(HIDDEN_SIZE, dtype=np.float32)


def test_a_refusal_after_a_head_draft_takes_what_that_cost():
    ratios, survival = made_up_tables(0)
    for is_head_first, milliseconds in ((False, 0.01), (True, 1.01)):
        policy = new_policy({10: flat_costs(0.01)}, ratios, survival, SURE, is_head_first=is_head_first)
        refused = choose(policy, 10, HERE)
        assert (refused.shape, refused.kind) == (PLAIN_STEP, "drafted")
        assert refused.milliseconds == pytest.approx(milliseconds)


def test_features_are_read_until_that_has_cost_the_budget():
    """A head draft that is always refused costs a plain step each time."""
    ratios, survival = made_up_tables(0)
    policy = new_policy({10: flat_costs(0.01)}, ratios, survival, SURE, is_head_first=True)
    requested = 0
    for _ in range(1000):
        decision = choose(policy, 10, HERE)
        requested += decision.is_drafting
        policy.observe(decision, 1, 0.02 if decision.is_drafting else 0.01)
    assert RegretBudget.GRANT <= requested <= RegretBudget.GRANT + 1000 * RegretBudget.EARNED + 2


@examples(40)
@given(st.integers(0, 1 << 30), st.booleans(), st.booleans())
def test_it_is_never_slower_than_plain_steps_beyond_the_budgets(seed, drafts, changes):
    """Whatever is accepted, on a machine that changes its speed, where trees take up to three times their cost."""
    random = np.random.default_rng(seed)
    ratios, survival = made_up_tables(seed) if drafts else ({}, np.empty(0, dtype=np.float32))
    costs = StepCosts(0.3, dict.fromkeys(DRAFT_WIDTHS, 0.2), {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}, 0.1, 1.0)
    policy, lost = ObjectivePolicy({50: costs}, ratios, survival, None), 0.0
    luck, budgets = random.uniform(0.0, 0.6), 2 if drafts else 1
    for iteration in range(1500):
        if iteration % 100 == 0:
            policy.begin()
        pace = 2.0 if changes and iteration % 400 < 200 else 1.0
        expected = np.sort(random.uniform(1.0, 8.0, 4))
        expected[0] = 1.0
        decision = choose(policy, 50) if random.random() < 0.3 else policy.choose(50, ModelFree(expected.tolist(), 16))
        if decision.kind == "plain":
            policy.observe(decision, 1, pace)
            continue
        tokens = 1 + (random.integers(0, decision.shape.verify_width) if random.random() < luck else 0)
        spent = costs.iteration_ms(*decision.shape) * pace * random.uniform(0.8, 3.0)
        plain_ms = policy._plain_ms
        policy.observe(decision, int(tokens), spent)
        lost += min(spent / plain_ms - tokens, RegretBudget.WORST)
    assert lost <= budgets * (RegretBudget.GRANT + 7 * RegretBudget.WORST + 1500 * RegretBudget.EARNED)


def decoded_with_drafts(added, claimed, seed, iterations=3000):
    """Milliseconds a token with a drafter and by model-free drafts alone, and the share of iterations that draft.

    A drafted tree gives ``added`` / x tokens more than a model-free one that gives x; its measured survival claims
    another number where x is 1.
    """
    costs = StepCosts(0.1, {1: 0.05}, {1: 1.0, 2: 1.05, 4: 1.15, 8: 1.3}, 0.05, 1.05)
    survival = (claimed / MAX_DEPTH) * np.ones(MAX_DEPTH)
    times = []
    for ratios in ({}, {1: LEVELS * np.ones(4)}):
        random, policy, spent, tokens, drafted = np.random.default_rng(seed), None, 0.0, 0, 0
        policy = ObjectivePolicy({50: costs}, ratios, survival, None)
        policy.begin()
        for _ in range(iterations):
            best = random.uniform(1.0, 2.0)  # tokens that model-free drafts give here
            decision = policy.choose(50, ModelFree([1.0, 1 + 0.6 * (best - 1), 1 + 0.8 * (best - 1), best], 7))
            mean = decision.estimated if decision.kind == "model_free" else 1.0
            if decision.kind == "drafted":
                decision = policy.prune(decision, [1.0, 2.0, 3.0, 4.0], 50)
                mean, drafted = best + added / best, drafted + 1
            found = 1 + random.poisson(mean - 1.0)
            milliseconds = costs.iteration_ms(*decision.shape)
            policy.observe(decision, int(found), milliseconds)
            spent, tokens = spent + milliseconds, tokens + found
        times.append(spent / tokens)
    return times[1], times[0], drafted / iterations


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_adds_nothing_is_left_whatever_was_claimed(seed):
    """Its trees are faster than plain steps all the same: they have the model-free drafts."""
    with_it, without, drafted = decoded_with_drafts(0.0, 2.0, seed)
    assert 0.0 < drafted < 0.1
    assert with_it < 1.02 * without


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_adds_what_was_claimed_drafts_nearly_always(seed):
    with_it, without, drafted = decoded_with_drafts(1.5, 1.5, seed)
    assert drafted > 0.8
    assert with_it < 0.85 * without


def test_a_drafter_of_which_nothing_is_claimed_is_not_tried():
    assert decoded_with_drafts(1.5, 0.0, 0)[2] == 0.0


def test_gains_are_counted_at_the_speed_of_now():
    """Trees of 8 ms are 2 plain steps where those take 4 ms, and 8 where they take 1."""
    ratios, survival = made_up_tables(3)
    slower, usual = (ObjectivePolicy({100: flat_costs(1.0)}, ratios, survival, None) for _ in range(2))
    for policy, plain_ms in ((slower, 4.0), (usual, 1.0)):
        policy.begin()
        for _ in range(20):
            policy.observe(Decision(PLAIN_STEP), 1, plain_ms)
        for _ in range(7):
            policy.observe(Decision(TreeShape(1, 1, 2), 2.0, 8.0, is_drafting=True), 3, 8.0)
    assert slower._budgets["drafted"].is_open
    assert not usual._budgets["drafted"].is_open


def test_tokens_alone_may_be_maximised():
    ratios, survival = made_up_tables(3)
    policy = new_policy(
        {100: flat_costs(0.001)}, ratios, survival, None, objective="aal"
    )  # plain steps are nearly free
    decision = policy.choose(100)
    free = StepCosts(0.0, dict.fromkeys(DRAFT_WIDTHS, 1e-9), dict.fromkeys(VERIFY_WIDTHS, 1.0), 0.0, 1.0)
    assert value_of(decision.shape, free, ratios, survival) == pytest.approx(
        best_value(free, ratios, survival), rel=1e-6
    )
    assert policy.prune(decision, [1.0, 1.2, 1.2, 1.1], 100).shape.verify_width == 2


def test_costs_that_change_are_followed_and_so_is_the_choice():
    """Trees four times as slow as measured are predicted so, and lose against plain steps at the old cost."""
    ratios, survival = made_up_tables(3)
    policy = new_policy({100: flat_costs(1.5)}, ratios, np.ones_like(survival), None)
    drafted = policy.choose(100)
    assert drafted.kind == "drafted"
    costs_ms = flat_costs(1.5).iteration_ms(*drafted.shape)
    assert drafted.milliseconds == pytest.approx(costs_ms)
    for _ in range(60):
        decision = policy.choose(100)
        if decision.kind == "drafted":
            policy.observe(decision, 1, 4 * flat_costs(1.5).iteration_ms(*decision.shape))
        else:
            policy.observe(decision, 1, 1.5)
    assert policy.choose(100).shape == PLAIN_STEP
    assert policy.prune(drafted, [1.0, 1.1, 1.2, 1.3], 100).milliseconds > 1.1 * costs_ms


def test_the_first_trees_after_unread_tokens_do_not_set_the_latency_scale():
    """The drafter has to read the prompt, or what model-free drafts covered."""
    ratios, survival = made_up_tables(3)
    policy = new_policy({100: flat_costs(4.0)}, ratios, np.ones_like(survival), None)
    tree = Decision(TreeShape(1, 1, 2), 2.0, 2.0, is_drafting=True)
    for unread in (Decision(TreeShape(0, 3, 4), 2.0, 1.0), None):
        policy.begin() if unread is None else policy.observe(unread, 2, 1.0)
        before = policy._scales.factors[-1]
        policy.observe(tree, 2, 6.0)
        assert policy._scales.factors[-1] == before
        policy.observe(tree, 2, 6.0)
        assert policy._scales.factors[-1] > before


def test_what_was_learned_is_plain_data_to_go_on_from():
    ratios, survival = made_up_tables(3)

    def made():
        return new_policy({100: flat_costs(4.0)}, ratios, survival, None)

    policy, other = made(), made()
    for _ in range(40):
        decision = policy.choose(100, ModelFree([1.0, 2.0, 3.0, 3.5], 8))
        policy.observe(decision, 2, 1.3 * decision.milliseconds)
    other.restore(json.loads(json.dumps(policy.state())))
    assert other.state() == policy.state()
    requested = 100, ModelFree([1.0, 1.5, 1.8, 2.0], 8)
    assert other.choose(*requested) == policy.choose(*requested)
