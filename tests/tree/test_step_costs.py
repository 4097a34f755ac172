"""What iterations and passes cost, by hand and by readable loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_costs import COSTS, costs_of, random_costs

from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.step_costs import OVERLAP, StepCosts, lower_envelope


def test_free_guesses_cost_no_drafting() -> None:
    costs = random_costs(np.random.default_rng(2))

    assert TreeShape(0, 5, 8).is_free
    assert not PLAIN_STEP.is_free
    assert not TreeShape(1, 5, 8).is_free
    assert costs.iteration_ms(0, 5, 8) == costs.verify_ms[8] + costs.overhead_ms


def test_iteration_cost_and_speedup_by_hand() -> None:
    assert COSTS.iteration_ms(2, 3, 4) == 1.0 + 2 * 0.75 + 5.0 + 0.25
    assert COSTS.iteration_ms(2, 1, 1) == 1.0 + 4.0 + 0.25
    assert COSTS.iteration_ms(2, 0, 8) == 4.5
    assert COSTS.speedup(2.5, 2, 3, 4) == 2.5 * 4.0 / 7.75


def test_unusable_costs_are_all_named() -> None:
    with pytest.raises(ValueError, match="plain_ms must be positive") as caught:
        StepCosts(head_ms=-1.0, draft_ms={1: 0.0}, verify_ms={2: 5.0, 4: 3.0}, overhead_ms=0.0, plain_ms=0.0)
    for part in ("head_ms", "draft_ms[1] must be", "needs width 1", "lower_envelope"):
        assert part in str(caught.value)


def test_envelope_is_the_cheapest_width_at_least_as_wide() -> None:
    random = np.random.default_rng(2)
    for _ in range(50):
        widths = random.choice(64, size=6, replace=False) + 1
        measured = {int(width): float(random.integers(1, 6)) for width in widths}
        envelope = lower_envelope(measured)
        for width in measured:
            wider = [other for other in sorted(measured) if other >= width]
            best = min(wider, key=lambda other: measured[other])  # the first, so the narrowest, of equals
            assert envelope[width] == (measured[best], best)
        StepCosts(0.0, {1: 1.0}, {1: 0.5} | {width: cost for width, (cost, _) in envelope.items()}, 0.0, 1.0)


@pytest.mark.parametrize("measured", [{}, {1: 0.0}, {0: 1.0}, {1: float("nan")}])
def test_envelope_refuses_what_cannot_be_a_time(measured: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="measured"):
        lower_envelope(measured)


@pytest.mark.parametrize("slowness", [0.7, 1.0, 1.4, 3.0])
def test_widths_cost_what_the_longer_of_reading_and_computing_takes(slowness):
    """By the p-norm: the narrowest tree's pass as it was, the others beside it."""
    for seed in range(20):
        costs = random_costs(np.random.default_rng(seed))
        now, usual = costs.where_memory_is(slowness), costs.verify_ms
        whole, most = {}, math.inf  # computing a row takes no longer than in a wider pass
        for width in sorted(usual, reverse=True):
            own = (usual[width] ** OVERLAP - usual[1] ** OVERLAP) ** (1 / OVERLAP) / width
            computing = (width * (own if usual[width] >= 1.15 * usual[1] else min(own, most))) ** OVERLAP
            most = min(most, own)
            reading = usual[width] ** OVERLAP - computing
            whole[width] = (slowness**OVERLAP * reading + computing) ** (1 / OVERLAP)
        rising = np.maximum.accumulate([whole[width] for width in usual])

        assert list(now.verify_ms.values()) == pytest.approx(list(rising * usual[2] / whole[2]))
        assert replace(now, verify_ms=usual) == costs


def test_few_rows_that_cost_what_many_do_wait_for_memory_alone():
    """Measured while memory is slow: that six compute less than eight shows once it is fast."""
    costs = costs_of({1: 20.5, 6: 21.4, 8: 21.4, 16: 30.0})
    fast, slow = (costs.where_memory_is(slowness).verify_ms for slowness in (0.75, 1.3))

    assert costs.read_share(1) == 1.0
    assert 1.0 > costs.read_share(6) > 0.95 > costs.read_share(8) > 0.8 > 0.3 > costs.read_share(16) > 0.0
    assert fast[8] > 1.05 * fast[6]
    assert slow[8] == slow[6]


def test_a_pass_that_takes_clearly_longer_than_a_rows_tells_itself_how_long_it_computes():
    """Few rows may take another unit than many: that sixteen cost little more says nothing of four then."""
    costs = costs_of({1: 3.0, 2: 3.6, 4: 4.2, 16: 4.4})
    own = {width: (3.0 / costs.verify_ms[width]) ** OVERLAP for width in costs.verify_ms}

    assert [costs.read_share(width) for width in own] == pytest.approx(list(own.values()))


def test_the_slower_memory_is_the_less_more_rows_cost():
    fast, usual, slow = (COSTS.where_memory_is(slowness).verify_ms for slowness in (0.8, 1.0, 1.5))
    assert usual == pytest.approx(COSTS.verify_ms)
    assert fast[8] / fast[2] > usual[8] / usual[2] > slow[8] / slow[2] > 1.0
    assert StepCosts(0.0, {}, {1: 4.0}, 0.0, 4.0).where_memory_is(2.0).verify_ms == {1: 4.0}
