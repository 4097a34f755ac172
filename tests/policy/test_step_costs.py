"""What iterations and passes cost, by hand and by readable loops."""

import numpy as np
import pytest
from made_costs import COSTS, random_costs

from yggdrasil.policy.costs import LatencyScales, StepCosts, lower_envelope
from yggdrasil.policy.objective import speedup
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape


def test_model_free_drafts_cost_no_drafting() -> None:
    costs = random_costs(np.random.default_rng(2))

    assert TreeShape(0, 5, 8).is_free
    assert not PLAIN_STEP.is_free
    assert not TreeShape(1, 5, 8).is_free
    assert costs.iteration_ms(0, 5, 8) == costs.verify_ms[8] + costs.overhead_ms


def test_iteration_cost_and_speedup_by_hand() -> None:
    assert COSTS.iteration_ms(2, 3, 4) == 1.0 + 2 * 0.75 + 5.0 + 0.25
    assert COSTS.iteration_ms(2, 1, 1) == 1.0 + 4.0 + 0.25
    assert COSTS.iteration_ms(2, 0, 8) == 4.5
    assert speedup(2.5, TreeShape(2, 3, 4), COSTS) == pytest.approx(2.5 * 4.0 / 7.75)


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


def follow(scales, kind, milliseconds, count, cost=2.0):
    for _ in range(count):
        scales.observe(kind, cost * scales.of(kind), milliseconds)


def test_costs_that_changed_are_followed():
    scales = LatencyScales()
    follow(scales, "drafted", 5.0, 100)
    assert scales.of("drafted") == pytest.approx(2.5, rel=0.01)
    follow(scales, "drafted", 1.0, 100)
    assert scales.of("drafted") == pytest.approx(0.5, rel=0.02)


def test_the_machine_is_followed_by_kinds_that_are_not_tried():
    """Drafted trees took twice as long while the machine was slow; now only model-free ones are tried."""
    scales = LatencyScales()
    for _ in range(100):
        follow(scales, "drafted", 4.0, 1)
        follow(scales, "model_free", 4.0, 1)
    follow(scales, "model_free", 2.0, 100)
    assert scales.of("model_free") == pytest.approx(1.0, rel=0.02)
    assert scales.of("drafted") < 1.3


def test_kinds_that_differ_have_scales_of_their_own():
    scales = LatencyScales()
    for _ in range(400):
        follow(scales, "drafted", 2.2, 1)
        follow(scales, "model_free", 1.8, 1)
    assert scales.of("drafted") / scales.of("model_free") == pytest.approx(2.2 / 1.8, rel=0.1)


def test_a_pause_of_the_machine_is_not_its_speed():
    scales = LatencyScales()
    scales.observe("drafted", 1.0, 10_000.0)
    assert scales.of("drafted") < 1.4


def test_the_first_warm_plain_step_tells_how_fast_the_machine_is():
    """Eight times slower than measured, as beside other work; a step after a prefill is slower than any other."""
    scales = LatencyScales()
    scales.observe("plain", 1.0, 20.0, is_cold=True)
    assert scales.of("plain") == 1.0
    scales.observe("plain", 1.0, 8.0)
    assert (scales.of("plain"), scales.of("drafted"), scales.of("model_free")) == (8.0, 8.0, 8.0)


def test_scales_go_on_from_their_state():
    scales, other = LatencyScales(), LatencyScales()
    follow(scales, "plain", 3.0, 5)
    other.restore(scales.state())
    follow(scales, "drafted", 3.0, 5)
    follow(other, "drafted", 3.0, 5)
    assert other.state() == scales.state()
