"""Who decides on a shape: the gate's bookkeeping, and the argmax against three nested loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.engine.gate import Gate
from yggdrasil.engine.objective_policy import DepthEvidence, ObjectivePolicy
from yggdrasil.engine.policy import PLAIN_POLICY, Decision, FixedPolicy
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.evidence import EvidenceSizes
from yggdrasil.tree.objective import CLEARLY_BETTER, PLAIN_STEP, StepCosts, TreeShape

MAX_DEPTH, DRAFT_WIDTHS, VERIFY_WIDTHS, HIDDEN_SIZE = 4, (1, 2, 4), (1, 2, 4, 8), 6


def pause_after_refusal(gate):
    """Plain steps taken without asking, after the objective said no."""
    gate.refused()
    count = 0
    while gate.is_paused():
        count += 1
    return count


def test_pauses_double_up_to_a_limit():
    gate = Gate()

    assert not gate.is_paused()
    assert [pause_after_refusal(gate) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 64, 128, 128]


@pytest.mark.parametrize("reset", [Gate.drafted, Gate.begin])
def test_speculating_again_makes_pauses_short_again(reset):
    gate = Gate()
    pause_after_refusal(gate)
    pause_after_refusal(gate)
    reset(gate)

    assert pause_after_refusal(gate) == 1


def plain_steps_until_open(gate):
    count = 0
    while gate.is_paused():
        gate.rested()
        count += 1
    return count


def entered():
    """A gate behind the first tree of a request."""
    gate = Gate()
    gate.settle(0.0)
    return gate


def test_losses_are_paid_back_by_plain_steps_before_drafting_again():
    """Beyond a credit and a stake of 8 plain steps each, what is lost is earned back at 3 % a plain step."""
    gate = entered()
    for _ in range(5):
        gate.settle(1 - 4.0)  # 4 plain steps for one token
        assert not gate.is_paused()
    gate.settle(1 - 4.0)
    assert plain_steps_until_open(gate) == pytest.approx((18 - 8) / 0.03, abs=1)
    gate.settle(1 - 4.0)
    assert not gate.is_paused()  # another stake


def test_what_was_gained_may_be_lost_again():
    gate = entered()
    for _ in range(20):
        gate.settle(2.0)
    lost = 0
    while not gate.is_paused():
        gate.settle(-1.0)
        lost += 1
    assert lost == 8 + 40 + 8 + 1


def test_the_price_of_entry_is_charged_behind_the_request():
    """Reading the prompt costs ten plain steps; what follows may earn them, and is not stopped for them."""
    gate = Gate()
    for _ in range(2):
        gate.begin()
        gate.settle(-10.0)
        assert not gate.is_paused()
        gate.settle(1.0)
    gate.begin()
    assert plain_steps_until_open(gate) == pytest.approx((20 - 2 - 8) / 0.03, abs=1)

    earning = Gate()
    for _ in range(50):
        earning.begin()
        earning.settle(-10.0)
        for _ in range(11):
            earning.settle(1.0)
            assert not earning.is_paused()


def test_a_machine_that_stands_still_does_not_close_the_gate_for_long():
    gate = entered()
    for _ in range(2):
        assert not gate.is_paused()
        gate.settle(3 - 10_000.0)
    assert 0 < plain_steps_until_open(gate) < 600


def test_gains_are_counted_at_the_speed_of_now():
    ratios, survival = made_up_tables(3)
    slower, usual = (ObjectivePolicy({100: flat_costs(1.0)}, ratios, survival, None) for _ in range(2))
    for policy in (slower, usual):
        for _ in range(20):
            policy.settle(policy.rest(100), 1, 4.0 if policy is slower else 1.0, rested=True)
        tree = Decision(TreeShape(1, 1, 2), 2.0, 8.0)
        for _ in range(5):
            policy.settle(tree, 3, 8.0, rested=False)  # 2 plain steps when slow, else 8

    assert slower.rest(100) is None
    assert usual.rest(100) is not None


def test_the_first_step_behind_a_prefill_only_bounds_the_price_of_plain_steps():
    ratios, survival = made_up_tables(3)
    policy = ObjectivePolicy({100: flat_costs(1.0)}, ratios, survival, None)
    promised = []
    for _ in range(30):
        policy.begin()
        if (cold := policy.rest(100)) is None:
            continue
        policy.settle(cold, 1, 2.0, rested=True)
        second = policy.rest(100)
        promised.append(second.milliseconds)
        policy.settle(second, 1, 1.25, rested=True)
    assert len(promised) == 4  # the first request, and every ninth
    assert promised == sorted(promised)
    assert promised[0] >= 1.0
    assert promised[-1] < 1.25


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
    for level in range(shape.depth):
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


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(
    step_costs(),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.integers(0, 10_000),
    st.sampled_from(VERIFY_WIDTHS),
)
def test_verify_width_is_the_planned_one_unless_another_is_clearly_better(costs, gains, seed, planned):
    ratios, survival = made_up_tables(seed)
    expected = np.cumsum(gains) + 1.0
    shape = TreeShape(2, 3, planned)
    policy = ObjectivePolicy({100: costs}, ratios, survival, None)
    pruned, tokens, milliseconds, _ = policy.prune(shape, expected, 100)

    paid_ms = costs.head_ms + 2 * costs.draft_ms[2] + costs.overhead_ms
    worth = {w: tokens / (paid_ms + costs.verify_ms[w]) for w, tokens in zip(VERIFY_WIDTHS, expected, strict=True)}
    assert pruned == shape._replace(verify_width=pruned.verify_width)
    assert worth[pruned.verify_width] == (
        max(worth.values()) if max(worth.values()) > CLEARLY_BETTER * worth[planned] else worth[planned]
    )
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


def test_after_a_refusal_the_objective_is_not_asked_for_a_while():
    """Plain steps are nearly free near the start of the context and never chosen behind it."""
    ratios, survival = made_up_tables(0)
    policy = ObjectivePolicy({10: flat_costs(0.01), 1000: flat_costs(1000.0)}, ratios, survival, None)
    begin_past_samples(policy)
    assert policy.choose(GivenEvidence(10)).shape == PLAIN_STEP
    later = [policy.rest(1000) is None for _ in range(10)]

    assert later == [False] + [True] * 9
    policy.choose(GivenEvidence(10))
    policy.learner.begin()
    assert policy.rest(1000) is None  # a new request begins without a pause
    assert policy.choose(GivenEvidence(1000)).shape.depth > 0


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
    ratios, survival = made_up_tables(3)
    policy = ObjectivePolicy({100: flat_costs(2.0)}, ratios, survival, None)
    for _ in range(60):
        policy.begin()
        for _ in range(2):
            policy.rest(100)
            policy.settle(Decision(PLAIN_STEP, 1.0, 2.0), 1, 6.0, rested=True)
    while (sample := policy.rest(100)) is None:
        policy.begin()
    assert sample.milliseconds == pytest.approx(6.0, rel=0.01)


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


def requests_until_a_sample(policy):
    """Requests that begin with trees, after the last one that began with plain steps."""
    count = 0
    policy.begin()
    while policy.rest(100) is None:
        count += 1
        policy.begin()
    return count


@pytest.mark.parametrize(("tokens", "requests"), [(1, 8), (8, 64)])
def test_plain_steps_are_sampled_seldom_where_trees_have_gained_much(tokens, requests):
    ratios, survival = made_up_tables(3)
    policy = ObjectivePolicy({100: flat_costs(1.0)}, ratios, survival, None)
    begin_past_samples(policy)
    for _ in range(40):
        policy.settle(Decision(TreeShape(1, 1, 2), 2.0, 1.0), tokens, 1.0, rested=False)

    assert requests_until_a_sample(policy) == requests
