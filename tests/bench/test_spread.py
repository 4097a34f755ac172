"""Medians and quartiles of few and of many samples."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.bench.spread import describe, spread

SAMPLES = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=40)


@given(SAMPLES)
def test_quartiles_never_leave_the_samples(values):
    found = spread(values)

    assert min(values) <= found["low"] <= found["median"] <= found["high"] <= max(values)


@given(st.lists(st.floats(0.1, 100.0), min_size=4, max_size=40))
def test_quartiles_are_those_of_numpy(values):
    found = spread(values)

    np.testing.assert_allclose([found["low"], found["median"], found["high"]], np.quantile(values, [0.25, 0.5, 0.75]))
    assert "samples" not in found


def test_few_samples_are_shown_themselves():
    two_far_apart = [0.24, 2.066]  # whose extrapolated quartiles were -0.2 and 2.5

    assert spread(two_far_apart) == {"median": 1.153, "low": 0.24, "high": 2.066, "samples": [0.24, 2.066]}
    assert describe(spread(two_far_apart)) == "1.15 (0.24, 2.07)"
    assert describe(spread([3.0, 1.0, 2.0]), 1) == "2.0 (1.0, 2.0, 3.0)"
    assert describe(spread([1.5])) == "1.50"
    assert describe(spread([])) == "0.00"
    assert describe(spread([1.0, 2.0, 3.0, 4.0, 5.0])) == "3.00 (2.00 to 4.00)"
