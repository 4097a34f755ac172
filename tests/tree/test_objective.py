"""The objective against readable loops over everything."""

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from yggdrasil.tree.objective import (
    OVERLAP,
    PLAIN_STEP,
    Objective,
    ShapeChooser,
    StepCosts,
    TreeShape,
    choose_verify_width,
    expected_tokens_by_width,
    least_useful,
    lower_envelope,
)

COSTS = StepCosts(
    head_ms=1.0, draft_ms={1: 0.5, 2: 0.75}, verify_ms={1: 4.0, 2: 4.0, 4: 5.0, 8: 9.0}, overhead_ms=0.25, plain_ms=4.5
)
ROOT = Path(__file__).parents[2]


def random_costs(random: np.random.Generator) -> StepCosts:
    verify = np.sort(random.uniform(2.0, 12.0, size=4)).tolist()
    draft = random.uniform(0.1, 1.0, size=3).tolist()
    return StepCosts(
        head_ms=random.uniform(0.1, 2.0),
        draft_ms=dict(zip((1, 2, 4), draft, strict=True)),
        verify_ms=dict(zip((1, 2, 4, 8), verify, strict=True)),
        overhead_ms=random.uniform(0.0, 1.0),
        plain_ms=random.uniform(1.0, 12.0),
    )


def slow_choose_shape(
    survival: npt.NDArray[Any], ratios: Mapping[int, npt.NDArray[Any]], costs: StepCosts, objective: Objective
) -> tuple[TreeShape, float]:
    """Return the best shape and its value by four nested loops; first wins, smaller shapes come first."""
    best, best_value = PLAIN_STEP, 1.0 if objective == "aal" else 1.0 / costs.plain_ms
    for width in sorted(ratios):
        for depth in range(1, len(survival) + 1):
            for column, verify_width in enumerate(sorted(costs.verify_ms)):
                table, aal = ratios[width], 1.0
                for level in range(depth if table.ndim == 2 else len(survival)):
                    ratio = table[level, column] if table.ndim == 2 else table[depth - 1, level, column]
                    aal += survival[level] * ratio
                value = aal if objective == "aal" else aal / costs.iteration_ms(width, depth, verify_width)
                if value > best_value + 1e-12:
                    best, best_value = TreeShape(width, depth, verify_width), value
    return best, best_value


@pytest.mark.parametrize("objective", ["latency", "aal"])
@pytest.mark.parametrize("knows_budget", [False, True])
def test_the_chosen_shape_is_the_argmax_of_all_loops(objective: Objective, knows_budget: bool) -> None:
    random = np.random.default_rng(0)
    chosen = set()
    for _ in range(60):
        costs = random_costs(random)
        size = (5, 5, 4) if knows_budget else (5, 4)
        ratios = {width: random.uniform(0.2, 1.0, size=size) for width in (1, 2, 4)}
        survival = np.cumprod(random.uniform(0.0, 1.0, size=5)).astype(np.float32)

        expected, _ = slow_choose_shape(survival, ratios, costs, objective)

        assert ShapeChooser(costs, ratios, objective).choose(survival) == expected
        chosen.add(expected)
    assert len(chosen) > 5, "the random cases should not all have one answer"


@pytest.mark.parametrize("knows_budget", [False, True])
def test_a_candidate_adds_its_levels_up(knows_budget: bool) -> None:
    """Of any shape, by the ratios of its own budget; the best tree is the best of them."""
    random = np.random.default_rng(1)
    costs = random_costs(random)
    ratios = {w: random.uniform(0.2, 1.0, size=(5, 5, 4) if knows_budget else (5, 4)) for w in (1, 2, 4)}
    survival = np.cumprod(random.uniform(0.5, 1.0, size=5))
    chooser = ShapeChooser(costs, ratios)
    for shape in chooser.shapes[1:]:
        table = ratios[shape.width][shape.depth - 1] if knows_budget else ratios[shape.width]
        levels = table[:, costs.verify_widths.index(shape.verify_width)].copy()
        levels[5 if knows_budget else shape.depth :] = 0.0
        candidate = chooser.candidate(shape, survival)

        np.testing.assert_allclose(chooser.level_ratios(shape), levels)
        assert candidate.shape == shape
        assert candidate.tokens == pytest.approx(1.0 + levels @ survival)
        assert candidate.worth == pytest.approx(candidate.tokens / costs.iteration_ms(*shape))
    worths = [chooser.candidate(shape, survival).worth for shape in chooser.shapes[1:]]
    assert chooser.best_tree(survival).worth == pytest.approx(max(worths))


def test_free_guesses_cost_no_drafting() -> None:
    costs = random_costs(np.random.default_rng(2))

    assert TreeShape(0, 5, 8).is_free
    assert not PLAIN_STEP.is_free
    assert not TreeShape(1, 5, 8).is_free
    assert costs.iteration_ms(0, 5, 8) == costs.verify_ms[8] + costs.overhead_ms


def test_shape_ties_go_to_the_plain_step_then_to_the_smaller_shape() -> None:
    same = np.ones((3, 4))
    chooser = ShapeChooser(COSTS, {1: same, 2: same}, "aal")

    assert chooser.choose(np.zeros(3)) == PLAIN_STEP
    assert chooser.choose(np.array([0.3, 0.0, 0.0])) == TreeShape(1, 1, 1)
    assert chooser.choose(np.array([0.3, 0.1, 0.1])) == TreeShape(1, 3, 1)


@pytest.mark.parametrize(("table", "tokens"), [(np.ones((2, 4)), 1.5), (np.ones((2, 2, 4)), 1.75)])
def test_levels_beyond_the_budget_are_what_a_table_of_budgets_says(table: npt.NDArray[Any], tokens: float) -> None:
    chooser = ShapeChooser(COSTS, {1: table})

    expected = dict(zip(chooser.shapes, chooser.expected_tokens(np.array([0.5, 0.25])), strict=True))

    assert expected[TreeShape(1, 1, 4)] == tokens
    assert expected[TreeShape(1, 2, 4)] == 1.75


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


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({}, "ratios is empty"),
        ({3: np.ones((2, 4))}, r"no draft cost for widths \[3\]"),
        ({1: np.ones((2, 3))}, r"must be \[D, 4\]"),
        ({1: np.ones((2, 4)), 2: np.ones((3, 4))}, "disagree"),
        ({1: np.full((2, 4), np.nan)}, "non-finite"),
    ],
)
def test_unusable_ratio_tables_are_refused(ratios: dict[int, npt.NDArray[Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShapeChooser(COSTS, ratios)


def test_expected_tokens_add_the_best_nodes() -> None:
    acceptance = np.array([0.9, 0.5, 0.4])

    assert expected_tokens_by_width(acceptance, (1, 2, 3, 8)).tolist() == pytest.approx([1.0, 1.9, 2.4, 2.8])
    stacked = expected_tokens_by_width(np.stack([acceptance, acceptance / 2]), (1, 4))
    assert stacked.tolist() == [pytest.approx([1.0, 2.8]), pytest.approx([1.0, 1.9])]


@pytest.mark.parametrize("objective", ["latency", "aal"])
def test_choose_verify_width_is_the_argmax(objective: Objective) -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        costs = random_costs(random)
        drafting_ms = random.uniform(0.0, 5.0)
        tokens = expected_tokens_by_width(np.sort(random.uniform(size=6))[::-1], costs.verify_widths).tolist()
        values = [
            count / (1.0 if objective == "aal" else drafting_ms + costs.verify_ms[width] + costs.overhead_ms)
            for width, count in zip(costs.verify_widths, tokens, strict=True)
        ]

        chosen = choose_verify_width(tokens, drafting_ms, costs, objective)

        assert chosen == costs.verify_widths[values.index(max(values))]


def test_the_planned_verify_width_is_left_for_a_clear_win_alone() -> None:
    within, beyond = [1.0, 2.0, 2.3, 2.3], [1.0, 2.0, 2.6, 2.6]  # COSTS hardly tell widths apart beside 1000 ms
    assert choose_verify_width(within, 1000.0, COSTS, planned=COSTS.verify_widths[1]) == COSTS.verify_widths[1]
    assert choose_verify_width(beyond, 1000.0, COSTS, planned=COSTS.verify_widths[1]) == COSTS.verify_widths[2]
    assert choose_verify_width(within, 1000.0, COSTS, "aal", planned=COSTS.verify_widths[1]) == COSTS.verify_widths[2]


def test_verify_width_ties_go_to_the_smaller() -> None:
    assert choose_verify_width([2.0, 2.0, 2.0, 2.0], 1.0, COSTS) == 1
    assert choose_verify_width([1.0, 2.0, 2.0, 2.0], 1.0, COSTS, "aal") == 2


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


def test_planning_and_prediction_import_no_heavy_package() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'sklearn', 'scipy', 'pandas')))"
    modules = "yggdrasil.tree.objective, yggdrasil.predictor.training, yggdrasil.profiling.tally"

    subprocess.run([sys.executable, "-c", f"{blocked}; import {modules}"], check=True, cwd=ROOT)


def test_a_path_is_useful_while_it_may_be_worth_its_row():
    flat, steep = costs_of({1: 1.0, 2: 1.1, 8: 1.7}), costs_of({1: 1.0, 2: 1.5, 8: 6.0})

    assert least_useful([flat]) == pytest.approx(0.1 / 2)
    assert least_useful([steep, flat]) == least_useful([flat])
    assert least_useful([costs_of({1: 1.0})]) == 0.0
    assert least_useful([costs_of({1: 1.0, 6: 1.2, 8: 1.2, 16: 2.2})]) == pytest.approx(0.2 / 7 / 2)


def costs_of(verify_ms):
    return StepCosts(head_ms=0.0, draft_ms={1: 0.1}, verify_ms=verify_ms, overhead_ms=0.0, plain_ms=1.0)


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


def test_a_chooser_goes_by_the_costs_that_it_was_given_last():
    ratios = {1: np.full((2, 2, 4), 0.5), 2: np.full((2, 2, 4), 0.7)}
    survival = np.array([0.8, 0.5])
    chooser, other = ShapeChooser(COSTS, ratios), random_costs(np.random.default_rng(3))
    chooser.use(other)

    assert chooser.choose(survival) == slow_choose_shape(survival, ratios, other, "latency")[0]
    assert chooser.choose(survival) == ShapeChooser(other, ratios).choose(survival)
    assert chooser.costs == other
