"""What iterations and passes cost, by hand and by readable loops."""

import numpy as np
import pytest
from made_costs import COSTS, random_costs

from yggdrasil.policy.costs import StepCosts, lower_envelope
from yggdrasil.policy.policy import LatencyScales
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape


def test_model_free_drafts_cost_no_drafting() -> None:
    costs = random_costs(np.random.default_rng(2))

    assert TreeShape(0, 5, 8).is_model_free
    assert not PLAIN_STEP.is_model_free
    assert not TreeShape(1, 5, 8).is_model_free
    assert costs.iteration_ms(0, 5, 8) == costs.verify_ms[8] + costs.overhead_ms


def test_iteration_cost_by_hand() -> None:
    assert COSTS.iteration_ms(2, 3, 4) == 1.0 + 2 * 0.75 + 5.0 + 0.25
    assert COSTS.iteration_ms(2, 1, 1) == 1.0 + 4.0 + 0.25
    assert COSTS.iteration_ms(2, 0, 8) == 4.5


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


PLAIN, NARROW, WIDE, DRAFTED = 0, 1, 4, -1  # steps of scales over five verify widths


def new_scales():
    """Of a machine that is as fast as measured."""
    scales = LatencyScales(5)
    follow(scales, PLAIN, 1.0, 1)
    return scales


def follow(scales, step, milliseconds, count, cost=1.0):
    for _ in range(count):
        scales.observe(step, cost * scales.factors[step], milliseconds)


@pytest.mark.parametrize("milliseconds", [5.0, 0.2])
def test_costs_that_changed_are_followed(milliseconds):
    scales = new_scales()
    follow(scales, DRAFTED, milliseconds, 100)
    assert scales.factors[DRAFTED] == pytest.approx(milliseconds, rel=0.02)


def test_the_speed_of_the_machine_is_followed_by_steps_that_are_not_tried():
    scales = new_scales()
    follow(scales, NARROW, 2.0, 100)
    assert scales.factors[NARROW] == pytest.approx(2.0, rel=0.02)
    assert scales.factors[PLAIN] == scales.factors[WIDE] == scales.factors[DRAFTED] > 1.3


def test_plain_steps_that_became_faster_than_wide_passes_are_seen():
    """As where the memory is faster and arithmetic is not."""
    scales = new_scales()
    for _ in range(100):
        follow(scales, PLAIN, 0.7, 1)
        follow(scales, NARROW, 1.0, 1)
    assert scales.factors[NARROW] / scales.factors[PLAIN] == pytest.approx(1.0 / 0.7, rel=0.05)


def test_a_pause_of_the_machine_is_not_its_speed():
    scales = new_scales()
    scales.observe(DRAFTED, 1.0, 10_000.0)
    assert scales.factors[DRAFTED] < 1.1


@pytest.mark.parametrize("step", [PLAIN, WIDE])
def test_the_first_warm_step_tells_how_fast_the_machine_is(step):
    """Eight times slower than measured, as beside other work; a step after a prefill is slower than any other."""
    scales = LatencyScales(5)
    scales.observe(step, 1.0, 20.0, is_cold=True)
    assert scales.factors == [1.0] * 6
    scales.observe(step, 1.0, 8.0)
    assert scales.factors == [8.0] * 6


def test_ratios_of_steps_are_kept_and_the_next_step_sets_the_speed():
    scales, other = new_scales(), LatencyScales(5)
    follow(scales, PLAIN, 3.0, 5)
    other.restore(scales.state())
    assert other.state() == scales.state()
    follow(other, WIDE, 10 * scales.factors[WIDE], 1)
    assert other.factors == pytest.approx([10 * factor for factor in scales.factors])
    with pytest.raises(ValueError, match="factors of 6 steps, not of 4"):
        LatencyScales(3).restore(scales.state())
