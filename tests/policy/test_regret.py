"""What may be lost, and how it is earned again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.policy.regret import PlainProbe, RegretBudget


def entered():
    """Behind the first tree of a request."""
    budget = RegretBudget()
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
    assert steps_until_open(budget) == pytest.approx((RegretBudget.REOPENS + 1) / RegretBudget.EARNED, abs=1)
    budget.settle(-RegretBudget.REOPENS / 2)
    assert budget.is_open


def test_what_was_gained_may_be_lost_again():
    budget = entered()
    for _ in range(20):
        budget.settle(2.0)
    lost = 0
    while budget.is_open:
        budget.settle(-1.0)
        lost += 1
    assert lost == RegretBudget.GRANT + 40 + 1


def test_the_price_of_entry_is_charged_behind_the_request():
    """Reading the prompt costs nine plain steps; what follows may earn them, and is not stopped for them."""
    budget = RegretBudget()
    budget.settle(-9.0)
    assert budget.is_open
    budget.settle(0.5)
    budget.begin()
    assert not budget.is_open

    earning = RegretBudget()
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
    assert 0 < steps_until_open(budget) <= 100 * (4 + RegretBudget.REOPENS) + 1


@given(st.lists(st.floats(-4.0, 10.0), max_size=400))
def test_losses_stay_within_grant_and_earnings(gains):
    """Whatever trees give: the theorem of the module."""
    budget, lost, without = RegretBudget(), 0.0, 0
    budget.settle(0.0)
    for gained in gains:
        if budget.is_open:
            budget.settle(gained)
            lost -= gained
        else:
            budget.earn()
            without += 1
        assert lost <= RegretBudget.GRANT + RegretBudget.EARNED * without + RegretBudget.WORST + 1e-9


def test_plain_steps_are_probed_at_the_beginning_of_a_request_now_and_then():
    probe, probed = PlainProbe(), []
    for iteration in range(2000):
        step = iteration % 10  # of a request
        if probe.is_due(step):
            probed.append(iteration)
        probe.observe(is_warm_plain=probe.is_due(step) and step > 0)
    assert probed[:2] == [0, 1]
    assert {later - earlier for earlier, later in zip(probed[1::2], probed[2::2], strict=False)} == {
        PlainProbe.EVERY + 9
    }


def test_an_account_goes_on_from_its_state():
    budget, other = entered(), RegretBudget()
    budget.settle(-3.0)
    other.restore(budget.state())
    assert other.state() == budget.state()
