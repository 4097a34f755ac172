"""Iterations on the device that stands in for a GPU: the trees of a CPU, few launches and one wait."""

from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

import pytest

from yggdrasil.acceptance.sampling import SamplingParams

DRAWN = SamplingParams(temperature=5.0, seed=2)
# There, draft models offer as many candidates to a target that samples, and trees drafted ahead are not extended.
OTHER_TREES = ("a draft model", "a draft model ahead, by turns with statistics")


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(1, get_context("spawn"), import_module, ("there",)) as pool:
        yield pool


def _there(*given):
    return import_module("there").decode(*given)


@pytest.mark.parametrize(
    ("name", "sampling", "most", "reads"),
    [
        ("a draft model", DRAWN, 5, 1),  # the first iteration drafts its tree and the next one
        ("statistics alone", SamplingParams(), 2, 1),
        ("statistics alone", DRAWN, 2, 1),
        ("n-grams", SamplingParams(), 2, 1),
        ("a user's drafter", SamplingParams(), 2, 1),
        ("a user's drafter by turns with statistics", SamplingParams(), 2, 1),
        ("a draft model ahead, by turns with statistics", SamplingParams(), 6, 1),
        ("a draft model, which tells the depth", SamplingParams(), 4, 2),  # it waits for the head draft, too
    ],
)
def test_the_host_waits_only_for_what_it_reads(processes, name, sampling, most, reads):
    answer, expected, iterations = processes.submit(_there, name, sampling).result()

    tokens, _, num_accepted = answer
    assert tokens == expected[0]
    assert answer == expected or name in OTHER_TREES
    assert num_accepted > 0
    for iteration in iterations:
        assert iteration["waits"] == []  # blocking copies, and values asked of the device
        assert iteration["reads"] == reads
        assert iteration["launches"] <= (most if iteration["draft width"] else 2)
