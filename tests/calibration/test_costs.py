"""What the objective takes from stage samples."""

from dataclasses import replace

import pandas as pd
import pytest
from made_up import PLAIN_MS, SHAPES

from yggdrasil.calibration.calibration_settings import QUICK, Effort
from yggdrasil.calibration.measurement.passes import PASS
from yggdrasil.calibration.measurement.stages import COLUMNS as SAMPLE_COLUMNS
from yggdrasil.calibration.measurement.stages import costs_from, useful_verify_widths


def passes_of(milliseconds):
    """One turn, in which a plain step takes ``PLAIN_MS`` and a pass of each width so long."""
    return [(64, 0, 0, 0, width, PASS, ms) for width, ms in {1: PLAIN_MS, **milliseconds}.items()]


def test_a_narrower_draft_step_never_costs_more():
    """Measured so, it is noise, and would make the objective draft wider trees for nothing."""
    levels = {1: 0.5, 2: 0.3, 4: 0.4}  # milliseconds a level, by width
    rows = [(64, 1, 0, 0, 1, stage, PLAIN_MS) for stage in ("plain", "iteration")]
    rows += passes_of({4: 20.0})
    for width, ms in levels.items():
        for depth in (2, 4):
            shape = (width, depth, 4)
            rows.append((64, 1, *shape, "draft_steps", ms * (depth - 1)))
            rows += [(64, 1, *shape, stage, 1.0) for stage in ("head_draft", "verify", "overhead", "iteration")]
    costs = costs_from(pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS)), replace(SHAPES, verify_widths=(1, 4)))

    assert costs[0].draft_ms == pytest.approx({1: 0.3, 2: 0.3, 4: 0.4})


def test_trees_that_cost_no_pass_have_an_overhead_of_their_own():
    """What they take outside of the models; theirs says nothing of what drafted ones cost."""
    rows = [(64, 1, 0, 0, 1, stage, PLAIN_MS) for stage in ("plain", "iteration")]
    rows += passes_of({2: 10.0, 4: 12.0})
    for width, ms in ((2, 10.0), (4, 12.0)):
        for depth in (2, 4):
            times = {"draft_steps": 0.1 * depth, "head_draft": 0.5, "verify": ms, "overhead": 0.4, "iteration": 15.0}
            rows += [(64, 1, 1, depth, width, stage, time) for stage, time in times.items()]
        times = {"draft_steps": 0.0, "head_draft": 0.0, "verify": 14 - ms, "overhead": 0.1, "iteration": 17.0}
        rows += [(64, 1, 0, 1, width, stage, time) for stage, time in times.items()] * 3
    for width in (8, 16, 32):  # that the plan has not
        rows += [(64, 1, 0, 1, width, "overhead", 9.0)] * 9
    shapes = replace(SHAPES, verify_widths=(1, 2, 4))
    frame = pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))
    costs = costs_from(frame, shapes)[0]
    without = costs_from(
        pd.DataFrame([row for row in rows if row[2] or not row[3]], columns=list(SAMPLE_COLUMNS)), shapes
    )[0]

    assert costs.model_free_overhead_ms == 0.1
    assert replace(costs, model_free_overhead_ms=None) == without
    assert costs.head_ms == 0.5
    assert costs.verify_ms == {1: PLAIN_MS, 2: 10.0, 4: 12.0}
    assert useful_verify_widths(frame, shapes) == (1, 2, 4)
    steps = costs.steps()
    assert [steps.iteration_ms(0, 3, width) for width in (2, 4)] == pytest.approx([10.1, 12.1])
    assert steps.iteration_ms(1, 1, 4) == pytest.approx(0.5 + 12.0 + costs.overhead_ms)


@pytest.mark.parametrize(("samples", "expected"), [((0.3, 0.1, 0.2), 0.2), ((-0.1, 0.1, -0.2), 0.0)])
def test_what_reading_takes_a_token_is_a_median_and_never_less_than_nothing(samples, expected):
    rows = [(64, 1, 0, 0, 1, stage, PLAIN_MS) for stage in ("plain", "iteration")]
    rows += passes_of({4: 20.0})
    for depth in (2, 4):
        rows += [(64, 1, 1, depth, 4, stage, 1.0) for stage in ("draft_steps", "head_draft", "verify", "overhead")]
    shapes = replace(SHAPES, verify_widths=(1, 4))
    read = [(64, 1, 0, 0, 1, "reading", ms) for ms in samples]
    without, costs = (
        costs_from(pd.DataFrame(some, columns=list(SAMPLE_COLUMNS)), shapes)[0] for some in (rows, rows + read)
    )

    assert (without.reading_ms, costs.reading_ms) == (0.0, expected)
    assert replace(costs, reading_ms=0.0) == without
    assert costs.steps().reading_ms == expected


@pytest.mark.parametrize(
    ("max_length", "contexts"),
    [(64, [1]), (400, [128]), (2048, [128, 512, 1024]), (8192, [128, 512, 1024, 3968, 7936])],
)
def test_costs_are_measured_where_texts_get_to(max_length, contexts):
    """The nearest serve: behind a long text, the costs of a short one would promise wide passes for little."""
    assert Effort().contexts_within(max_length) == contexts
    assert QUICK.contexts_within(8192) == [128, 3968, 7936]


def test_a_width_is_dropped_where_a_wider_pass_is_clearly_cheaper():
    """Not where both take as long: they do while memory is slow."""
    rows = passes_of({2: 11.0, 4: 10.4, 8: 10.0, 16: 20.0})
    frame = pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))

    assert useful_verify_widths(frame, replace(SHAPES, verify_widths=(1, 2, 4, 8, 16))) == (1, 4, 8, 16)


def iterations_of(milliseconds):
    """In which passes took so long, and plain steps of width 1."""
    rows = [(64, 1, 0, 0, 1, stage, milliseconds[1]) for stage in ("plain", "iteration")]
    for width in sorted(milliseconds)[1:]:
        for depth in (2, 4):
            stages = ("draft_steps", "head_draft", "verify", "overhead")
            rows += [(64, 1, 1, depth, width, stage, milliseconds[width]) for stage in stages]
    return rows


def costs_of(rows, widths):
    frame = pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))
    (costs,) = costs_from(frame, replace(SHAPES, verify_widths=tuple(widths)))
    return costs


def test_what_widths_cost_beside_each_other_is_compared_within_a_turn():
    """In iterations, wide passes had their turn while memory was slow: they were believed to cost twice as much.

    A turn in which the whole machine is slow, and one that is interrupted, say nothing.
    """
    rows = iterations_of({1: PLAIN_MS, 2: 1.1 * PLAIN_MS, 4: 1.1 * PLAIN_MS, 8: 2.4 * PLAIN_MS})
    for turn, slowness in enumerate((1.0, 1.0, 3.0, 1.0, 1.0)):
        passes = {1: 1.0, 2: 1.0, 4: 1.02, 8: 1.2 if turn else 9.0}
        rows += [(64, turn, 0, 0, width, PASS, slowness * PLAIN_MS * ms) for width, ms in passes.items()]
    costs = costs_of(rows, (1, 2, 4, 8))

    expected = {1: PLAIN_MS, 2: PLAIN_MS, 4: 1.02 * PLAIN_MS, 8: 1.2 * PLAIN_MS}
    assert costs.verify_ms == pytest.approx(expected, rel=1e-3)
    assert costs.plain_ms == pytest.approx(PLAIN_MS)


# Passes of a real target on two cores, whose memory is fast for a while and slow for a while.
FAST = {1: 15.4, 2: 16.2, 4: 16.6, 6: 16.7, 8: 18.0, 16: 32.4, 32: 62.2}
SLOW = {1: 20.7, 2: 21.3, 4: 21.5, 6: 21.6, 8: 21.7, 16: 30.0, 32: 57.5}


@pytest.mark.parametrize(("turns", "iterations"), [(FAST, SLOW), (SLOW, FAST)], ids=["slower since", "faster since"])
def test_passes_cost_what_they_do_at_the_memory_that_iterations_met(turns, iterations):
    """Costs in proportion to turns of fast memory had sixteen rows cost two plain steps where they take one and a half.

    Only the plain steps of iterations are asked: passes come one by one, when memory may be another.
    """
    turned = [(64, turn, 0, 0, width, PASS, ms) for turn in range(3) for width, ms in turns.items()]
    met = {**iterations, 4: 1.5 * iterations[4], 16: 2.0 * iterations[16], 32: 0.5 * iterations[32]}
    costs = costs_of(iterations_of(met) + turned, iterations)

    assert costs.verify_ms == pytest.approx(iterations, rel=0.11)  # the cores are a tenth slower while memory is fast


def test_a_pass_that_was_quicker_than_a_plain_step_costs_what_that_does():
    """Noise, or other code for one row than for several."""
    rows = iterations_of({1: PLAIN_MS, 2: PLAIN_MS}) + passes_of({2: 0.6 * PLAIN_MS})

    assert costs_of(rows, (1, 2)).verify_ms == {1: PLAIN_MS, 2: PLAIN_MS}
