"""Estimates of acceptance follow what trees had accepted, and begin as the scores say."""

import numpy as np
import pytest

from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import ModelFree
from yggdrasil.policy.policy import AcceptanceCorrection, ObjectivePolicy


def test_scores_are_taken_as_they_are_at_first():
    assert AcceptanceCorrection().factor == 1.0


@pytest.mark.parametrize(("estimated", "accepted"), [(2.0, 3.0), (4.0, 1.0), (1.0, 0.0)])
def test_the_ratio_of_accepted_to_estimated_is_learned(estimated, accepted):
    correction = AcceptanceCorrection()
    for _ in range(300):
        correction.observe(estimated, accepted)
    assert estimated * correction.factor == pytest.approx(accepted, abs=0.15)


def test_a_change_of_text_is_followed():
    correction = AcceptanceCorrection()
    for accepted, count in ((3.0, 300), (1.5, 150)):
        for _ in range(count):
            correction.observe(3.0, accepted)
    assert 3.0 * correction.factor == pytest.approx(1.5, abs=0.2)


def test_what_is_not_tried_is_taken_as_it_is_again():
    correction = AcceptanceCorrection()
    for _ in range(100):
        correction.observe(4.0, 0.0)
    assert 4.0 * correction.factor < 0.2
    for _ in range(400):
        correction.decay()
    assert correction.factor == pytest.approx(1.0, rel=0.025)


def test_a_request_does_not_inherit_that_the_last_text_repeated_itself():
    correction = AcceptanceCorrection()
    for _ in range(300):
        correction.observe(2.0, 6.0)
    assert correction.factor > 2.5
    correction.begin()
    assert correction.factor == pytest.approx(1.0, abs=0.01)
    for _ in range(6):
        correction.observe(2.0, 0.0)
    assert correction.factor < 0.55


def test_a_request_inherits_that_scores_were_too_high():
    correction = AcceptanceCorrection()
    for _ in range(300):
        correction.observe(4.0, 1.0)
    inherited = correction.factor
    correction.begin()
    assert correction.factor == pytest.approx(inherited, abs=0.02)
    for _ in range(10):
        correction.observe(4.0, 4.0)
    assert correction.factor > 0.75


def test_the_policy_limits_what_a_request_inherits():
    costs = StepCosts(0.0, {}, {1: 1.0, 2: 1.1, 4: 1.2}, 0.1, 1.1)
    policy = ObjectivePolicy({0: costs}, {}, np.empty(0, dtype=np.float32), None)
    tree = ModelFree([1.0, 1.5, 2.0], 8)
    policy.begin()
    for _ in range(200):  # twice as many drafted tokens are accepted as estimated
        decision = policy.choose(64, tree)
        policy.observe(decision, 1 + round(2 * (decision.estimated - 1)), decision.milliseconds)
    assert policy.choose(64, tree).tokens == pytest.approx(3.0, abs=0.1)

    policy.begin()
    assert policy.choose(64, tree).tokens == pytest.approx(2.0, abs=0.05)
