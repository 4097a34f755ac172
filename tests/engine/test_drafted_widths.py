"""How many nodes of a drafted tree are verified: by what passes cost now."""

import numpy as np

from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.engine.policy import Decision
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.step_costs import StepCosts

COSTS = StepCosts(1.0, {1: 0.5}, {1: 20.0, 2: 20.1, 4: 20.4, 8: 24.0, 16: 40.0}, 0.2, 20.2)
SHAPE = TreeShape(1, 4, 2)


def new_policy():
    ratios = {1: np.ones((4, 5), dtype=np.float32)}
    return ObjectivePolicy({0: COSTS}, ratios, np.array([0.8, 0.6, 0.4, 0.3], dtype=np.float32), None)


def passes(policy, width, slowness=1.0, count=64):
    """Iterations that verify ``width`` nodes, on a machine that is so many times slower."""
    policy.begin()
    for _ in range(count):
        shape = TreeShape(1, 4, width)
        decision = Decision(shape, 2.0, COSTS.iteration_ms(*shape))
        policy.settle(
            decision, 2, decision.milliseconds * slowness, rested=False, pass_ms=COSTS.verify_ms[width] * slowness
        )


def verified(policy, *expected):
    return policy.prune(SHAPE, [1.0, 1.5, *expected], 0).shape.verify_width


def test_more_are_verified_where_memory_has_become_slow():
    policy = new_policy()
    promised = 2.0, 2.3, 2.5
    before = verified(policy, *promised), policy.stakes_beside(SHAPE, 0)[1:].tolist()
    passes(policy, 4, slowness=1.5)

    assert before[0] == 4
    assert verified(policy, *promised) == 8, "they cost hardly more than a row then"
    assert policy.stakes_beside(SHAPE, 0)[1:].tolist() != before[1]


def test_few_are_verified_now_and_then_to_tell_how_slow_memory_is():
    policy = new_policy()
    passes(policy, 16)

    assert verified(new_policy(), 2.0, 3.0, 9.0) == 16
    assert verified(policy, 2.0, 3.0, 9.0) == 4, "which waits for memory"
    passes(policy, 4, count=2)  # the first of a request tells nothing
    assert verified(policy, 2.0, 3.0, 9.0) == 16
