"""What the objective takes from samples of steps and iterations."""

from dataclasses import replace

import pytest
from made_up import PLAIN_MS, SHAPES

from yggdrasil.calibration.calibration_settings import QUICK, Effort
from yggdrasil.calibration.measurement.costs import costs_from, shows_pause, typical, useful_verify_widths
from yggdrasil.calibration.measurement.steps import Sample


def passes_of(milliseconds):
    """One turn, in which a plain step takes ``PLAIN_MS`` and a pass of each width so long."""
    return [Sample(64, 0, 0, 0, width, "pass", ms) for width, ms in {1: PLAIN_MS, **milliseconds}.items()]


def plain_iterations(ms=PLAIN_MS):
    times = {"plain": ms, "overhead": 0.2, "iteration": ms + 0.2}
    return [Sample(64, 0, 0, 0, 1, stage, time) for stage, time in times.items()]


def costs_of(rows, widths, draft_widths=()):
    (costs,) = costs_from(rows, replace(SHAPES, draft_widths=draft_widths, verify_widths=tuple(widths)))
    return costs


def drafted(width, **stages):
    return [Sample(64, 0, width, 4, 4, stage, ms) for stage, ms in {"verify": 99.0, **stages}.items()]


def test_a_narrower_draft_step_never_costs_more():
    """Measured so, it is noise, and would make the objective draft wider trees for nothing."""
    rows = [Sample(64, 0, width, 0, 1, "grow", ms) for width, ms in {1: 0.5, 2: 0.3, 4: 0.4}.items()]
    costs = costs_of(rows + passes_of({4: 20.0}), (1, 4), (1, 2, 4))

    assert costs.draft_ms == pytest.approx({1: 0.3, 2: 0.3, 4: 0.4})


def test_each_kind_of_iteration_has_an_overhead_of_its_own():
    """Attaching the last level is overhead: 1.0 ms of drafting are three growth steps of 0.3 and a rest."""
    rows = [*passes_of({2: 10.0, 4: 12.0}), *plain_iterations()]
    rows += [Sample(64, 0, 0, 1, 4, stage, ms) for stage, ms in (("verify", 99.0), ("overhead", 0.1))]
    trees = [Sample(64, 0, 2, 0, 1, "grow", 0.3), *drafted(2, overhead=0.4, head_draft=0.5, draft_steps=1.0)]
    costs = costs_of(rows + trees, (1, 2, 4), (2,))

    assert costs.model_free_overhead_ms == 0.1
    assert costs.overhead_ms == pytest.approx(0.4 + 0.1)
    assert costs.head_ms == 0.5
    assert costs.plain_ms == PLAIN_MS + 0.2
    assert costs.verify_ms == {1: PLAIN_MS, 2: 10.0, 4: 12.0}
    steps = costs.steps()
    assert [steps.iteration_ms(0, 3, width) for width in (2, 4)] == pytest.approx([10.1, 12.1])
    assert steps.iteration_ms(2, 4, 4) == pytest.approx(0.5 + 3 * 0.3 + 12.0 + 0.5)
    without = costs_of(rows, (1, 2, 4))
    assert (without.overhead_ms, without.model_free_overhead_ms, without.head_ms) == (0.1, None, 0.0)
    assert costs_of(passes_of({2: 10.0}), (1, 2)).plain_ms == PLAIN_MS
    first_use = [row for row in rows + trees if row not in plain_iterations()]
    assert costs_of(first_use, (1, 2, 4), (2,)).plain_ms == PLAIN_MS + 0.1, (
        "no plain iteration: it drafts nothing either"
    )


@pytest.mark.parametrize(("samples", "expected"), [((0.3, 0.1, 0.2), 0.2), ((-0.1, 0.1, -0.2), 0.0)])
def test_what_reading_takes_a_token_is_a_median_and_never_less_than_nothing(samples, expected):
    read = [Sample(64, 0, 0, 0, 1, "reading", ms) for ms in samples]
    without, costs = (costs_of(passes_of({4: 20.0}) + rows, (1, 4)) for rows in ([], read))

    assert (without.reading_ms, costs.reading_ms) == (0.0, expected)
    assert replace(costs, reading_ms=0.0) == without
    assert costs.steps().reading_ms == expected


@pytest.mark.parametrize(
    ("turns", "expected"), [((3.0, 1.0, 9.0), 1.0), ((9.0, 2.0, 1.0, 3.0), 2.0), ((9.0, 9.0, 2.0, 9.0, 1.0), 2.0)]
)
def test_iterations_take_the_lower_quartile(turns, expected):
    assert typical(turns) == expected


def test_a_step_takes_the_least_of_its_turns():
    """A busy machine leaves one turn undisturbed, not always the same."""
    turns = ({1: 9.0, 4: 50.0}, {1: 20.0, 4: 10.0}, *({1: 30.0, 4: 30.0},) * 4)
    rows = [Sample(64, turn, 0, 0, width, "pass", ms) for turn, each in enumerate(turns) for width, ms in each.items()]

    assert costs_of(rows, (1, 4)).verify_ms == {1: 9.0, 4: 10.0}


def test_a_step_that_only_a_pause_explains_is_lowered():
    rows = passes_of({2: 10.0, 8: 3840.0})

    assert shows_pause(rows)
    assert costs_of(rows, (1, 2, 8)).verify_ms[8] == 1.5 * 4 * 10.0
    assert not shows_pause(passes_of({2: 10.0, 8: 60.0}))
    assert shows_pause([Sample(64, 0, width, 0, 1, "grow", ms) for width, ms in ((1, 1.0), (2, 4.0))])


@pytest.mark.parametrize(
    ("max_length", "contexts"),
    [(64, [1]), (400, [128]), (2048, [128, 512, 1024]), (8192, [128, 512, 1024, 3968, 7936])],
)
def test_costs_are_measured_where_texts_get_to(max_length, contexts):
    """Costs measured at a short context would make wide passes at a long one look cheap."""
    assert Effort().contexts_within(max_length) == contexts
    assert QUICK.contexts_within(8192) == [128, 3968], "reading to the end takes a large model minutes"


def test_a_width_is_dropped_where_a_wider_pass_is_clearly_cheaper():
    """Not where both take as long: they do while memory is slow. The shortest context decides."""
    rows = passes_of({2: 11.0, 4: 10.4, 8: 10.0, 16: 20.0})
    longer = [sample._replace(context=512, ms=9.0) for sample in rows]

    shapes = replace(SHAPES, verify_widths=(1, 2, 4, 8, 16))
    assert useful_verify_widths(longer + rows, shapes) == (1, 4, 8, 16)


# Passes of a real target on two cores, whose memory is fast for a while and slow for a while.
FAST = {1: 15.4, 2: 16.2, 4: 16.6, 6: 16.7, 8: 18.0, 16: 32.4, 32: 62.2}
SLOW = {1: 20.7, 2: 21.3, 4: 21.5, 6: 21.6, 8: 21.7, 16: 30.0, 32: 57.5}


@pytest.mark.parametrize(("turns", "iterations"), [(FAST, SLOW), (SLOW, FAST)], ids=["slower since", "faster since"])
def test_passes_cost_what_they_do_at_the_memory_that_iterations_met(turns, iterations):
    """Costs in proportion to turns of fast memory had sixteen rows cost two plain steps where they take one and a half.

    Only the plain steps of iterations are asked: passes come one by one, when memory may be another.
    """
    turned = [Sample(64, turn, 0, 0, width, "pass", ms) for turn in range(3) for width, ms in turns.items()]
    met = [Sample(64, 0, 0, 1, width, "verify", 2.0 * ms) for width, ms in iterations.items()]
    costs = costs_of(turned + met + plain_iterations(iterations[1]), iterations)

    assert costs.verify_ms == pytest.approx(iterations, rel=0.11)  # the cores are a tenth slower while memory is fast


def test_a_pass_that_was_quicker_than_a_plain_step_costs_what_that_does():
    """Noise, or other code for one row than for several. A plain step is one of the passes then."""
    assert costs_of(passes_of({2: 0.6 * PLAIN_MS}) + plain_iterations(), (1, 2)).verify_ms == {1: PLAIN_MS, 2: PLAIN_MS}
    assert costs_of(passes_of({2: 5.0}), (1, 2)).verify_ms == {1: 5.0, 2: 5.0}
