"""Thread counts are compared on the same work; a thread that costs time is not used."""

import pandas as pd
import pytest
from tiny_pair import make_pair

from yggdrasil.calibration.measurement.threads import COLUMNS, ROUNDS, WIDTHS, best_threads, thread_counts, time_threads


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_counts_double_up_to_all_cores(cores, counts):
    assert thread_counts(cores) == counts


def samples_of(times):
    rows = [("target", count, width, turn, ms) for count, ms in times.items() for width in WIDTHS for turn in range(3)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


@pytest.mark.parametrize(
    ("times", "best"),
    [({1: 10.0, 2: 6.0}, 2), ({1: 10.0, 2: 10.2}, 2), ({1: 5.0, 2: 7.0}, 1), ({1: 10.0, 2: 11.0, 4: 4.0}, 4),
     ({1: 10.0, 2: 4.0, 4: 4.1, 8: 4.2}, 4)],
)  # fmt: skip
def test_of_counts_as_good_the_largest_is_taken(times, best):
    assert best_threads(samples_of(times)) == best


def test_every_count_is_timed_at_every_width():
    target = make_pair().target
    samples = time_threads(target, "target", [1, 2])
    layers = [module for module in target.model.modules() if hasattr(module, "num_threads")]
    assert {layer.num_threads for layer in layers} == {target.num_threads}
    assert samples.groupby(["threads", "width"]).size().to_dict() == {
        (count, width): ROUNDS for count in (1, 2) for width in WIDTHS
    }
    assert (samples["ms"] > 0).all()
