"""The objective against readable loops over everything."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from made_costs import COSTS, costs_of, random_costs

from yggdrasil.tree.objective import (
    Objective,
    ShapeChooser,
    choose_verify_width,
    expected_tokens_by_width,
    least_useful,
)
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.step_costs import StepCosts

ROOT = Path(__file__).parents[2]


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

        np.testing.assert_allclose(chooser.level_ratios(shape), np.trim_zeros(levels, "b"))
        assert candidate.shape == shape
        assert candidate.tokens == pytest.approx(1.0 + levels @ survival)
        assert candidate.worth == pytest.approx(candidate.tokens / costs.iteration_ms(*shape))
    worths = [chooser.candidate(shape, survival).worth for shape in chooser.shapes[1:]]
    assert chooser.best_tree(survival).worth == pytest.approx(max(worths))


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


def test_less_than_the_planned_width_needs_a_clear_win_and_more_does_not() -> None:
    costs = costs_of({1: 1.0, 2: 1.1, 8: 2.0})

    assert choose_verify_width([1.0, 2.0, 3.1], 0.0, costs, planned=8) == 8
    assert choose_verify_width([1.0, 2.0, 2.9], 0.0, costs, planned=8) == 2
    assert choose_verify_width([1.0, 2.0, 3.5], 0.0, costs, planned=2) == 2
    assert choose_verify_width([1.0, 2.0, 3.7], 0.0, costs, planned=2) == 8
    assert choose_verify_width([1.0, 2.0, 3.1], 0.0, costs) == 2
    assert choose_verify_width([1.0, 2.0, 2.1], 0.0, costs, "aal", planned=2) == 8


def test_verify_width_ties_go_to_the_smaller() -> None:
    assert choose_verify_width([2.0, 2.0, 2.0, 2.0], 1.0, COSTS) == 1
    assert choose_verify_width([1.0, 2.0, 2.0, 2.0], 1.0, COSTS, "aal") == 2


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


def test_a_chooser_goes_by_the_costs_that_it_was_given_last():
    ratios = {1: np.full((2, 2, 4), 0.5), 2: np.full((2, 2, 4), 0.7)}
    survival = np.array([0.8, 0.5])
    chooser, other = ShapeChooser(COSTS, ratios), random_costs(np.random.default_rng(3))
    chooser.use(other)

    assert chooser.choose(survival) == slow_choose_shape(survival, ratios, other, "latency")[0]
    assert chooser.choose(survival) == ShapeChooser(other, ratios).choose(survival)
    assert chooser.costs == other
