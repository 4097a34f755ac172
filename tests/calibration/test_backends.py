"""Both backends are timed on every decoding step, over one copy of the weights, and compared step by step."""

import pandas as pd
import pytest
from tiny_pair import make_pair

from yggdrasil.calibration.backends import ROUNDS, compare_backends, time_backends
from yggdrasil.calibration.pair import sibling
from yggdrasil.calibration.step_times import SAMPLE_COLUMNS, STREAK
from yggdrasil.calibration.timed_steps import timed_steps
from yggdrasil.policy.fixed import PLAIN_POLICY

CONTEXT = 20


@pytest.fixture(scope="module")
def assembly():
    return make_pair().decoder(PLAIN_POLICY, backend="cudagraph").assembly  # stands in for packages: nothing compiles


def test_every_step_is_timed_on_both_backends(assembly):
    samples = time_backends(assembly, CONTEXT, lambda fraction: None)
    steps = {step[:3] for step in timed_steps([assembly], [CONTEXT])}
    counts = samples.groupby(["model", "step", "width", "backend"])["ms"].count()

    assert set(counts.index) == {(*step, backend) for step in steps for backend in ("cudagraph", "eager")}
    assert set(counts) == {ROUNDS * (STREAK - 1)}


def test_a_sibling_has_its_own_cache_and_the_same_weights(assembly):
    other = sibling(assembly, backend="eager")
    ours, theirs = ([t.data_ptr() for t in a.target.weights] for a in (assembly, other))
    assert ours == theirs
    caches = [{t.data_ptr() for t in a.target.cache.tensors()} for a in (assembly, other)]
    assert caches[0].isdisjoint(caches[1])
    assert (assembly.target.backend, other.target.backend) == ("cudagraph", "eager")


def test_the_comparison_takes_medians_by_step():
    times = {"inductor": [1.0, 2.0, 9.0], "eager": [3.0, 6.0, 5.0]}
    rows = [("target", "verify", 8, 128, 256, name, turn, ms) for name, all_ms in times.items()
            for turn, ms in enumerate(all_ms)]  # fmt: skip
    table = compare_backends(pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS)))

    assert table.to_dict("records") == [
        {"model": "target", "step": "verify", "width": 8, "context": 128, "eager_ms": 5.0, "package_ms": 2.0,
         "eager_over_package": 2.5}
    ]  # fmt: skip
