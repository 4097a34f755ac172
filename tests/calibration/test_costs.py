"""What the objective takes from stage samples."""

from dataclasses import replace

import pandas as pd
import pytest
from made_up import PLAIN_MS, SHAPES

from yggdrasil.calibration.measure import COLUMNS as SAMPLE_COLUMNS
from yggdrasil.calibration.measure import costs_from, useful_verify_widths
from yggdrasil.calibration.passes import PASS
from yggdrasil.calibration.settings import QUICK, Effort


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
    """All that they take beyond a drafted tree's pass; theirs says nothing of what drafted ones cost."""
    rows = [(64, 1, 0, 0, 1, stage, PLAIN_MS) for stage in ("plain", "iteration")]
    rows += passes_of({2: 10.0, 4: 12.0})
    for width, ms in ((2, 10.0), (4, 12.0)):
        for depth in (2, 4):
            times = {"draft_steps": 0.1 * depth, "head_draft": 0.5, "verify": ms, "overhead": 0.4, "iteration": 15.0}
            rows += [(64, 1, 1, depth, width, stage, time) for stage, time in times.items()]
        times = {"draft_steps": 0.0, "head_draft": 0.0, "verify": 14 - ms, "overhead": 0.2, "iteration": ms + 0.1}
        rows += [(64, 1, 0, 1, width, stage, time) for stage, time in times.items()] * 3
    for width in (8, 16, 32):  # that the plan has not
        rows.append((64, 1, 0, 1, width, "iteration", 99.0))
        rows.append((64, 1, 1, 2, width, "verify", 20.0))
    shapes = replace(SHAPES, verify_widths=(1, 2, 4))
    frame = pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))
    costs = costs_from(frame, shapes)[0]
    without = costs_from(
        pd.DataFrame([row for row in rows if row[2] or not row[3]], columns=list(SAMPLE_COLUMNS)), shapes
    )[0]

    assert costs.free_overhead_ms == pytest.approx(0.1)
    assert replace(costs, free_overhead_ms=None) == without
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


def test_what_widths_cost_beside_each_other_is_compared_within_a_turn():
    """In iterations, wide passes had their turn while memory was slow: they were believed to cost twice as much.

    Behind a draft all of them take a tenth more than they do among themselves, and plain steps do not.
    """
    rows = [(64, 1, 0, 0, 1, stage, PLAIN_MS) for stage in ("plain", "iteration")]
    for width, ms in {2: 1.1 * PLAIN_MS, 4: 1.1 * PLAIN_MS, 8: 2.4 * PLAIN_MS}.items():
        for depth in (2, 4):
            rows += [(64, 1, 1, depth, width, s, ms) for s in ("draft_steps", "head_draft", "verify", "overhead")]
    for turn, slowness in enumerate((1.0, 1.0, 3.0)):
        passes = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.2 if turn else 9.0}
        rows += [(64, turn, 0, 0, width, PASS, slowness * ms) for width, ms in passes.items()]
    shapes = replace(SHAPES, verify_widths=(1, 2, 4, 8))
    (costs,) = costs_from(pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS)), shapes)

    expected = {1: PLAIN_MS, 2: 1.1 * PLAIN_MS, 4: 1.1 * PLAIN_MS, 8: 1.1 * 1.2 * PLAIN_MS}
    assert costs.verify_ms == pytest.approx(expected, rel=1e-3)
    assert costs.plain_ms == pytest.approx(PLAIN_MS)


def test_the_level_of_passes_is_that_of_trees_alone():
    """Plain steps come in streaks, as warm as in turns; a pass behind a draft is colder."""
    rows = [(64, 1, 0, 0, 1, stage, PLAIN_MS) for stage in ("plain", "iteration")] + passes_of({4: 20.0})
    for depth in (2, 4):
        rows += [(64, 1, 1, depth, 4, s, 22.0) for s in ("draft_steps", "head_draft", "verify", "overhead")]
    (costs,) = costs_from(pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS)), replace(SHAPES, verify_widths=(1, 4)))

    assert costs.verify_ms == pytest.approx({1: PLAIN_MS, 4: 22.0})
