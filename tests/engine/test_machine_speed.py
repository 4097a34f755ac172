"""How slow memory and the cores are, learned from passes alone; and that all decisions follow it."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from yggdrasil.engine.machine_speed import MachineSpeed
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.engine.policy import Decision
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.step_costs import OVERLAP, StepCosts

READ_SHARES = {1: 1.0, 6: 0.55, 8: 0.22, 16: 0.002}
# Of a real target on two cores while memory was fast: eight rows cost a tenth more than six.
COSTS = StepCosts(
    head_ms=0.7, draft_ms={1: 0.2}, verify_ms={1: 15.4, 6: 16.5, 8: 18.4, 16: 35.2}, overhead_ms=0.3, plain_ms=15.5,
    free_overhead_ms=0.2,
)  # fmt: skip
HERE = SimpleNamespace(context=100)


def over_calibrated(width, memory, cores=1.0):
    share = READ_SHARES[width]
    return float((share * memory**OVERLAP + (1.0 - share) * cores**OVERLAP) ** (1.0 / OVERLAP))


def watched(speed, widths, count, memory, cores=1.0):
    random = np.random.default_rng(0)
    for number in range(count):
        width = widths[number % len(widths)]
        speed.observe(READ_SHARES[width], over_calibrated(width, memory, cores) * float(random.normal(1.0, 0.025)))
    return speed.of_memory


@pytest.mark.parametrize("widths", [(1, 6), (6, 8), (8, 8, 1), (1, *[6] * 20)])
def test_slow_memory_is_noticed_within_a_second_of_passes_and_so_is_its_end(widths):
    speed = MachineSpeed()
    watched(speed, widths, 200, 1.0)

    assert watched(speed, widths, 40, 1.36) == pytest.approx(1.36, rel=0.12)
    assert speed.of_pass(READ_SHARES[widths[-1]]) == pytest.approx(over_calibrated(widths[-1], 1.36), rel=0.03)
    assert watched(speed, widths, 200, 1.0) == pytest.approx(1.0, rel=0.06)


def test_a_machine_that_is_slow_in_all_costs_the_same_beside_itself():
    """As one whose cores are shared: passes that only read and passes that mostly compute tell it."""
    assert watched(MachineSpeed(), (1, 6, 8, 8), 600, 1.3, 1.3) == pytest.approx(1.0, abs=0.05)


def test_slow_cores_are_told_from_slow_memory():
    speed = MachineSpeed()
    watched(speed, (1, 8, 8), 3000, 1.0)  # however long nothing changed
    assert watched(speed, (1, 8, 8), 600, 1.0, 1.25) == pytest.approx(1 / 1.25, rel=0.06)


def test_a_pause_of_the_machine_says_little_but_the_first_pass_says_how_fast_it_is():
    speed = MachineSpeed()
    speed.observe(1.0, 4.0)
    assert speed.of_pass(1.0) == pytest.approx(4.0, rel=0.1)
    watched(speed, (1, 6), 400, 1.0)
    speed.observe(READ_SHARES[6], 30.0)
    assert speed.of_memory == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("over", [0.0, 1e-9, 1e9])
def test_no_time_leads_beyond_what_widths_can_be_believed_to_cost(over):
    """A clock that says nothing, or a machine of another age."""
    speed = MachineSpeed()
    for _ in range(300):
        speed.observe(1.0, over)

    assert 0.5 <= speed.of_memory <= 2.0
    verify_ms = COSTS.where_memory_is(speed.of_memory).verify_ms
    assert list(verify_ms.values()) == sorted(verify_ms.values())


def slowed_pass(shape, memory, costs=COSTS):
    """Milliseconds of a pass that waits for slower memory."""
    width = shape.verify_width if shape.depth else 1
    computed = costs.verify_ms[width] ** OVERLAP - costs.verify_ms[1] ** OVERLAP
    return float(((memory * costs.verify_ms[1]) ** OVERLAP + computed) ** (1 / OVERLAP))


def slowed_ms(shape, memory, costs=COSTS):
    """Of the iteration."""
    return costs.iteration_ms(*shape) * (1.0 - costs.pass_share(shape)) + slowed_pass(shape, memory, costs)


def settle(policy, decision, tokens, memory, *, costs=COSTS, rested=False):
    shape = decision.shape
    policy.settle(
        decision, tokens, slowed_ms(shape, memory, costs), rested=rested, pass_ms=slowed_pass(shape, memory, costs)
    )


def free_trees(policy, memory, requests=3, context=100, costs=COSTS):
    """Requests of free trees, each behind two plain steps; the last decision. Two rows more are worth .08 tokens."""
    for _ in range(requests):
        policy.learner.begin()
        for _ in range(2):
            settle(policy, Decision(PLAIN_STEP, 1.0, 15.5), 1, memory, costs=costs, rested=True)
        for _ in range(40):
            free = policy.free([1.0, 2.0, 2.08, 2.1], 8, context)
            settle(policy, free, 2, memory, costs=costs)
    return free


def counting_policy(costs=None):
    return ObjectivePolicy(costs or {100: COSTS}, {}, np.empty(0, dtype=np.float32), None)


def test_wider_trees_are_verified_while_memory_is_slow():
    """Two rows more are worth less than a tenth of a pass, and more than what they take while it waits for memory."""
    policy = counting_policy()
    assert free_trees(policy, 1.0).shape.verify_width == 6
    slow = free_trees(policy, 1.4)
    assert slow.shape.verify_width == 8
    assert slow.milliseconds == pytest.approx(slowed_ms(TreeShape(0, 8, 8), 1.4), rel=0.02)
    stakes = policy.stakes(100)
    assert stakes[4] / stakes[2] == pytest.approx(1.0, abs=0.03), "trees are grown for the same times"
    again = copy.deepcopy(policy)
    assert free_trees(again, 1.4, requests=1).shape.verify_width == 8
    assert free_trees(policy, 1.0).shape.verify_width == 6


def test_costs_of_every_context_follow_the_one_memory():
    far = replace(COSTS, verify_ms={1: 16.4, 6: 17.6, 8: 19.6, 16: 38.0})
    policy, widths = counting_policy({100: COSTS, 1000: far}), []
    for memory in (1.0, 1.4):
        free_trees(policy, memory)
        widths.append(policy.free([1.0, 2.0, 2.08, 2.1], 8, 1000).shape.verify_width)

    assert widths == [6, 8]


def drafting_policy():
    ratios = {1: np.array([[[0.0, 1.0, 1.06, 1.07]]])}  # [D, D, V]: of the one level's survival
    policy = ObjectivePolicy({100: COSTS}, ratios, np.array([0.9], dtype=np.float32), None)
    policy.learner.begin()
    return policy


def draft(policy, memory, count=64):
    for _ in range(count):
        settle(policy, Decision(PLAIN_STEP, 1.0, 15.5), 1, memory, rested=True)
        for _ in range(2):
            settle(policy, policy.choose(HERE), 2, memory)


def test_drafted_trees_become_wider_too():
    policy, shapes, beside = drafting_policy(), [], []
    for memory in (1.0, 1.4, 1.0):
        draft(policy, memory)
        shapes.append(policy.choose(HERE).shape.verify_width)
        stakes = policy.stakes_beside(TreeShape(1, 1, 6), 100)
        beside.append(stakes[4] / stakes[2])

    assert shapes == [6, 8, 6]
    assert beside[1] > 1.05 * max(beside[0], beside[2])


def test_what_drafting_takes_says_nothing_of_the_machine():
    """Trees five times as slow as promised, whose passes are not: the drafter's price is its own."""
    policy = drafting_policy()
    for _ in range(100):
        decision = policy.choose(HERE)
        policy.settle(
            decision, 2, 5 * COSTS.iteration_ms(*decision.shape), rested=False, pass_ms=slowed_pass(decision.shape, 1.0)
        )

    assert policy._costs is policy._calibrated
    assert policy._plain_ms == pytest.approx(COSTS.plain_ms, rel=0.01)


def test_a_slower_machine_is_slower_for_what_was_not_tried_too():
    """Else a way that was tried while it was slow would look worse than the others for long."""
    policy = drafting_policy()
    draft(policy, 1.0)
    promised = policy.choose(HERE).milliseconds
    for _ in range(30):
        settle(policy, policy.free([1.0, 2.6, 2.6, 2.6], 4, 100), 3, 1.4)

    assert policy._plain_ms == pytest.approx(1.4 * COSTS.plain_ms, rel=0.08)
    assert policy.choose(HERE).milliseconds == pytest.approx(
        promised * slowed_pass(TreeShape(1, 1, 6), 1.4) / 16.5, rel=0.08
    )


def test_what_a_drafted_tree_took_the_place_of_is_held_against_it_at_the_speed_of_now(monkeypatch):
    """Memory became slow in that very pass: the free tree would have met it too."""
    policy, gained = drafting_policy(), []
    draft(policy, 1.0, count=4)
    monkeypatch.setattr(policy._drafted.rivalry, "settle", gained.append)
    assert policy.free([1.0, 1.2, 1.2, 1.2], 8, 100) is None
    forgone, decision, before = policy._forgone, policy.choose(HERE), policy._speed.of_pass(COSTS.read_share(6))
    settle(policy, decision, 2, 1.4)
    change = policy._speed.of_pass(COSTS.read_share(6)) / before

    assert change > 1.02
    assert gained[0] == pytest.approx(
        2 - slowed_ms(decision.shape, 1.4) * forgone.tokens / (change * forgone.milliseconds), rel=1e-3
    )


def test_promises_stay_true_while_costs_are_made_anew():
    """Of passes of eight rows. When memory becomes slow they follow from below, and go no further than it did."""
    policy = counting_policy()
    free_trees(policy, 1.0)

    def errors(memory):
        for _ in range(120):
            free = policy.free([1.0, 1.2, 2.6, 2.7], 8, 100)
            took = slowed_ms(free.shape, memory)
            yield free.milliseconds / took - 1.0
            policy.settle(free, 2, took, rested=False, pass_ms=slowed_pass(free.shape, memory))

    slow, fast = list(errors(1.4)), list(errors(1.0))
    assert slow[0] < -0.1
    assert max(slow) < 0.012
    assert min(slow[16:]) > -0.01
    assert max(map(abs, fast[16:])) < 0.03


# Of the same target: three tiles of rows wait for memory while it is slow, and for the cores while it is fast, which
# the cores of this machine are a little slower for.
FAST = {1: 15.4, 6: 16.7, 12: 25.7, 16: 32.4}
SLOW = {1: 20.7, 6: 21.6, 12: 24.4, 16: 30.0}
REPETITIVE = [1.0, 3.0, 3.7, 3.8]


def policy_of(passes, ratios=None, objective="latency"):
    costs = StepCosts(
        head_ms=0.7, draft_ms={1: 0.2}, verify_ms=passes, overhead_ms=0.3, plain_ms=passes[1], free_overhead_ms=0.2
    )
    if ratios is None:
        return ObjectivePolicy({100: costs}, {}, np.empty(0, dtype=np.float32), None, objective)
    return ObjectivePolicy({100: costs}, ratios, np.array([0.9], dtype=np.float32), None)


def widths_read(policy, decide, passes, count=120):
    """Of ``count`` iterations while passes take so long."""
    random, widths = np.random.default_rng(0), []
    for _ in range(count):
        decision = decide(policy)
        width = decision.shape.verify_width
        pass_ms = passes[width] * float(random.normal(1.0, 0.025))
        policy.settle(decision, 3, pass_ms + decision.milliseconds * 0.02, rested=False, pass_ms=pass_ms)
        widths.append(width)
    return widths


def guess(policy):
    return policy.free(REPETITIVE, 12, 100)


def draft_and_prune(policy):
    return policy.prune(TreeShape(1, 1, 6), [1.0, 3.0, 4.2, 4.3], 100)


def begin(policy):
    """A request, behind the plain steps that show their price."""
    policy.learner.begin()
    for _ in range(2):
        settle(policy, Decision(PLAIN_STEP, 1.0, 15.5), 1, 1.0, rested=True)


@pytest.mark.parametrize("calibrated", [FAST, SLOW], ids=["calibrated fast", "calibrated slow"])
@pytest.mark.parametrize(
    ("decide", "ratios"), [(guess, None), (draft_and_prune, {1: np.array([[[0.0, 1.0, 1.3, 1.4]]])})]
)
def test_that_memory_became_fast_is_noticed_though_wide_passes_do_not_tell(calibrated, decide, ratios):
    policy = policy_of(calibrated, ratios)
    begin(policy)

    fast, slow, fast_again = (widths_read(policy, decide, passes) for passes in (FAST, SLOW, FAST))

    assert set(fast[-48:]) == {6}
    assert slow[-64:].count(12) >= 60
    assert slow[-64:].count(6) in range(1, 5), "now and then a narrow pass looks"
    assert set(fast_again[-48:]) == {6}


def test_where_tokens_alone_count_no_pass_is_narrow():
    policy = policy_of(SLOW, objective="aal")
    begin(policy)

    assert set(widths_read(policy, guess, SLOW)) == {16}
