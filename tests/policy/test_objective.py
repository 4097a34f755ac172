"""The objective: ties, tables that do not fit, and values of passes; test_policy has its argmax."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from made_costs import COSTS, costs_of

from yggdrasil.policy.objective import PassValues, ShapeTable, least_useful_probability
from yggdrasil.tree.shape import TreeShape


def test_shape_ties_go_to_the_smaller_shape() -> None:
    same = np.tril(np.ones((3, 3)))[:, :, None] * np.ones(4)
    table_of_shapes = ShapeTable(COSTS, {1: same, 2: same}, "aal")

    assert table_of_shapes.best_tree(np.array([0.3, 0.0, 0.0])).shape == TreeShape(1, 1, 1)
    assert table_of_shapes.best_tree(np.array([0.3, 0.1, 0.1])).shape == TreeShape(1, 3, 1)


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({3: np.ones((2, 2, 4))}, r"no draft cost for widths \[3\]"),
        ({1: np.ones((2, 2, 3))}, r"must be \[2, 2, 4\]"),
        ({1: np.ones((2, 4))}, r"must be \[2, 2, 4\]"),
        ({1: np.ones((2, 2, 4)), 2: np.ones((3, 3, 4))}, r"ratios\[1\] must be \[3, 3, 4\], got \[2, 2, 4\]"),
    ],
)
def test_unusable_ratio_tables_are_refused(ratios: dict[int, npt.NDArray[Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShapeTable(COSTS, ratios)


def test_verify_width_ties_go_to_the_smaller() -> None:
    assert PassValues(COSTS, 1.0).best([2.0, 2.0, 2.0, 2.0]) == (0, 2.0)
    assert PassValues(COSTS, 1.0, "aal").best([1.0, 2.0, 2.0, 2.0]) == (1, 2.0)


def test_passes_are_valued_at_their_present_time() -> None:
    passes = PassValues(COSTS, 1.0)  # of 5, 5, 6 and 10 ms
    passes.scale([9.0, 2.0, 1.0, 1.0])
    assert passes.milliseconds == [5.0, 10.0, 6.0, 10.0]
    assert passes.values == pytest.approx([1 / 5, 1 / 10, 1 / 6, 1 / 10])
    assert passes.best([1.0, 1.5, 1.5, 4.0], 1) == (3, 4.0)
    assert passes.best([1.0, 1.5, 1.5, 4.0], 1, correction=0.2) == (2, pytest.approx(1.1))
    assert passes.best([1.0, 1.5, 1.5, 4.0], 1, most=2.0) == (2, 1.5)


def test_a_path_is_useful_while_it_may_be_worth_its_row():
    flat, steep = costs_of({1: 1.0, 2: 1.1, 8: 1.7}), costs_of({1: 1.0, 2: 1.5, 8: 6.0})

    assert least_useful_probability([flat]) == pytest.approx(0.1 / 2)
    assert least_useful_probability([steep, flat]) == least_useful_probability([flat])
    assert least_useful_probability([costs_of({1: 1.0})]) == 0.0
    assert least_useful_probability([costs_of({1: 1.0, 6: 1.2, 8: 1.2, 16: 2.2})]) == pytest.approx(0.2 / 7 / 2)
