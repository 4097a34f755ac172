"""What may be lost, and how it is earned again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.engine.budget import Budget


def entered():
    """Behind the first tree of a request."""
    budget = Budget()
    budget.settle(0.0)
    return budget


def steps_until_open(budget):
    count = 0
    while not budget.is_open:
        budget.earn()
        count += 1
    return count


def test_what_is_lost_is_earned_again_before_anything_is_tried():
    budget = entered()
    for _ in range(2):
        budget.settle(-3.0)
        assert budget.is_open
    budget.settle(-3.0)
    assert steps_until_open(budget) == pytest.approx((Budget.AGAIN + 1) / Budget.EARNED, abs=1)
    budget.settle(-Budget.AGAIN / 2)
    assert budget.is_open


def test_what_was_gained_may_be_lost_again():
    budget = entered()
    for _ in range(20):
        budget.settle(2.0)
    lost = 0
    while budget.is_open:
        budget.settle(-1.0)
        lost += 1
    assert lost == Budget.GRANT + 40 + 1


def test_the_price_of_entry_is_charged_behind_the_request():
    """Reading the prompt costs nine plain steps; what follows may earn them, and is not stopped for them."""
    budget = Budget()
    budget.settle(-9.0)
    assert budget.is_open
    budget.settle(0.5)
    budget.begin()
    assert not budget.is_open

    earning = Budget()
    for _ in range(50):
        earning.begin()
        earning.settle(-9.0)
        for _ in range(10):
            earning.settle(1.0)
            assert earning.is_open


def test_a_machine_that_stands_still_does_not_close_it_for_long():
    budget = entered()
    for _ in range(3):
        budget.settle(3 - 10_000.0)
    assert 0 < steps_until_open(budget) <= 100 * (4 + Budget.AGAIN) + 1


@given(st.lists(st.floats(-4.0, 10.0), max_size=400))
def test_losses_stay_within_grant_and_earnings(gains):
    """Whatever trees give: the bound that the class states."""
    budget, lost, without = Budget(), 0.0, 0
    budget.settle(0.0)
    for gained in gains:
        if budget.is_open:
            budget.settle(gained)
            lost -= gained
        else:
            budget.earn()
            without += 1
        assert lost <= Budget.GRANT + Budget.EARNED * without + 4.0 + 1e-9
