"""What may be lost, and how it is earned again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.policy.policy import RegretBudget


def entered():
    """Behind the first tree of a request."""
    budget = RegretBudget()
    budget.add_tree(0.0)
    return budget


def steps_until_open(budget):
    count = 0
    while not budget.is_open:
        budget.earn()
        count += 1
    return count


def test_what_is_lost_is_earned_again_before_anything_is_tried():
    budget = entered()
    for _ in range(5):
        budget.add_tree(-3.0)
        assert budget.is_open
    budget.add_tree(-2.0)
    assert steps_until_open(budget) == pytest.approx((RegretBudget.REOPENS + 1) / RegretBudget.EARNED, abs=1)
    budget.add_tree(-RegretBudget.REOPENS / 2)
    assert budget.is_open


def test_earlier_gains_allow_no_more_loss_than_the_grant():
    budget = entered()
    for _ in range(20):
        budget.add_tree(2.0)
    lost = 0
    while budget.is_open:
        budget.add_tree(-1.0)
        lost += 1
    assert lost == RegretBudget.GRANT + 1


def test_the_price_of_entry_is_charged_behind_the_request():
    """Reading the prompt costs nine plain steps; what follows may earn them, and is not stopped for them."""
    budget = RegretBudget()
    for is_open in (True, False):
        budget.add_tree(-9.0)
        assert budget.is_open
        budget.add_tree(0.5)
        budget.begin()
        assert budget.is_open == is_open

    earning = RegretBudget()
    for _ in range(50):
        earning.begin()
        earning.add_tree(-9.0)
        for _ in range(10):
            earning.add_tree(1.0)
            assert earning.is_open


def test_a_machine_that_stands_still_does_not_close_it_for_long():
    budget = entered()
    for _ in range(5):
        budget.add_tree(3 - 10_000.0)
    assert 0 < steps_until_open(budget) <= 100 * (4 + RegretBudget.REOPENS) + 1


@given(st.lists(st.floats(-15.0, 10.0), max_size=400), st.integers(1, 40))
def test_losses_from_any_iteration_on_stay_within_grant_and_earnings(gains, length):
    """Whatever trees give, in requests of ``length`` iterations: the theorem of the module."""
    budget, worst = RegretBudget(), RegretBudget.WORST
    behind = 0.0  # loss less earnings since the iteration from which on it is highest
    first: float | None = None
    for iteration, gained in enumerate(gains):
        if iteration % length == 0:
            budget.begin()
            first = None
        if budget.is_open:
            budget.add_tree(gained)
            charged = max(gained, -worst if first is not None else -3 * worst)
            first = charged if first is None else first
            behind -= charged
        else:
            budget.earn()
            behind -= RegretBudget.EARNED
        behind = max(behind, 0.0)
        assert behind <= RegretBudget.GRANT + 4 * worst + max(-(first or 0.0), 0.0) + 1e-9
