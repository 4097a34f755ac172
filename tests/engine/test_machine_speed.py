"""How slow memory is beside the cores, learned from passes alone; and that decisions follow it."""

from types import SimpleNamespace

import numpy as np
import pytest

from yggdrasil.engine.memory_speed import MemorySpeed
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.engine.policy import Decision
from yggdrasil.tree.objective import OVERLAP, PLAIN_STEP, StepCosts, TreeShape

READ_SHARES = {1: 1.0, 6: 0.55, 8: 0.22, 16: 0.002}
# Of a real target on two cores while memory was fast: eight rows cost a tenth more than six.
COSTS = StepCosts(
    head_ms=0.7, draft_ms={1: 0.2}, verify_ms={1: 15.4, 6: 16.5, 8: 18.4, 16: 35.2}, overhead_ms=0.3, plain_ms=15.5,
    free_overhead_ms=0.2,
)  # fmt: skip


def pass_slowness(width, memory, cores=1.0):
    share = READ_SHARES[width]
    return float((share * memory**OVERLAP + (1.0 - share) * cores**OVERLAP) ** (1.0 / OVERLAP))


def watched(speed, widths, count, memory, cores=1.0):
    random = np.random.default_rng(0)
    for number in range(count):
        width = widths[number % len(widths)]
        speed.observe(READ_SHARES[width], pass_slowness(width, memory, cores) * float(random.normal(1.0, 0.025)))
    return speed.slowness


@pytest.mark.parametrize("widths", [(1, 6), (6, 8), (8, 8, 1), (1, *[6] * 20)])
def test_slow_memory_is_noticed_within_a_second_of_passes_and_so_is_its_end(widths):
    speed = MemorySpeed()
    watched(speed, widths, 200, 1.0)

    assert watched(speed, widths, 40, 1.36) == pytest.approx(1.36, rel=0.12)
    assert watched(speed, widths, 200, 1.0) == pytest.approx(1.0, rel=0.06)


def test_a_machine_that_is_slow_in_all_costs_the_same_beside_itself():
    """As one whose cores are shared: passes that only read and passes that mostly compute tell it."""
    assert watched(MemorySpeed(), (1, 6, 8, 8), 600, 1.3, 1.3) == pytest.approx(1.0, abs=0.05)


def test_slow_cores_are_told_from_slow_memory():
    assert watched(MemorySpeed(), (1, 8, 8), 600, 1.0, 1.25) == pytest.approx(1 / 1.25, rel=0.06)


def test_a_pause_of_the_machine_says_little():
    speed = MemorySpeed()
    watched(speed, (1, 6), 200, 1.0)
    speed.observe(READ_SHARES[6], 30.0)

    assert speed.slowness == pytest.approx(1.0, abs=0.08)


def slowed_ms(shape, memory):
    """An iteration of ``COSTS`` whose pass waits for slower memory."""
    width = shape.verify_width if shape.depth else 1
    read = COSTS.verify_ms[1]
    computed = COSTS.verify_ms[width] ** OVERLAP - read**OVERLAP
    return (
        COSTS.iteration_ms(*shape) - COSTS.verify_ms[width] + ((memory * read) ** OVERLAP + computed) ** (1 / OVERLAP)
    )


def test_wider_trees_are_verified_while_memory_is_slow():
    """Two rows more are worth .08 tokens: not a tenth of a pass, but what they take while it waits for memory."""
    policy = ObjectivePolicy({100: COSTS}, {}, np.empty(0, dtype=np.float32), None)
    expected = [1.0, 2.0, 2.08, 2.1]

    def decided(memory):
        for _ in range(3):
            policy.learner.begin()
            for _ in range(2):  # now and then a request begins with them
                policy.settle(Decision(PLAIN_STEP, 1.0, 15.5), 1, slowed_ms(PLAIN_STEP, memory), rested=True)
            for _ in range(40):
                free = policy.free(expected, 8, 100)
                policy.settle(free, 2, slowed_ms(free.shape, memory), rested=False)
        return free

    assert decided(1.0).shape.verify_width == 6
    assert decided(1.4).shape.verify_width == 8
    assert decided(1.4).milliseconds == pytest.approx(slowed_ms(TreeShape(0, 8, 8), 1.4), rel=0.02)
    stakes = policy.stakes(100)
    assert stakes[4] / stakes[2] == pytest.approx(1.0, abs=0.03), "trees are grown for the same times"
    assert decided(1.0).shape.verify_width == 6


HERE = SimpleNamespace(context=100)


def test_drafted_trees_become_wider_too():
    ratios = {1: np.array([[[0.0, 1.0, 1.06, 1.07]]])}  # [D, D, V]: of the one level's survival
    policy = ObjectivePolicy({100: COSTS}, ratios, np.array([0.9], dtype=np.float32), None)
    policy.learner.begin()
    shapes = []
    for memory in (1.0, 1.4, 1.0):
        for _ in range(64):
            decision = policy.choose(HERE)
            policy.settle(Decision(PLAIN_STEP, 1.0, 15.5), 1, slowed_ms(PLAIN_STEP, memory), rested=True)
            policy.settle(decision, 2, slowed_ms(decision.shape, memory), rested=False)
            policy.settle(decision, 2, slowed_ms(decision.shape, memory), rested=False)
        beside = policy.stakes_beside(policy.choose(HERE).shape, 100)
        shapes.append((policy.choose(HERE).shape.verify_width, round(beside[4] / beside[2], 1)))

    assert shapes[0][0] == shapes[2][0] == 6
    assert shapes[1][0] == 8
