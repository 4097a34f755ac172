"""Iterations on the device that stands in for a GPU: the tokens of transformers, few launches and one wait."""

from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

import pytest

from yggdrasil.acceptance.sampling import SamplingParams

DRAWN = SamplingParams(temperature=5.0, seed=2)


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(1, get_context("spawn"), import_module, ("there",)) as pool:
        yield pool


def _there(*given):
    return import_module("there").decode(*given)


@pytest.mark.parametrize(
    ("name", "sampling", "most"),
    [
        ("a draft model", DRAWN, 4),
        ("statistics alone", SamplingParams(), 2),
        ("statistics alone", DRAWN, 2),
        ("n-grams", SamplingParams(), 2),
        ("a user's drafter", SamplingParams(), 2),
        ("a user's drafter by turns with statistics", SamplingParams(), 2),
        ("a draft model ahead, by turns with statistics", SamplingParams(), 6),
    ],
)
def test_the_host_waits_only_for_the_result_of_the_pass(processes, name, sampling, most):
    tokens, expected, iterations = processes.submit(_there, name, sampling).result()

    assert tokens == expected
    assert len(iterations) < len(tokens) - 1  # drafts are accepted
    for iteration in iterations:
        assert iteration["waits"] == []  # blocking copies, and values asked of the device
        assert iteration["reads"] == 1
        assert iteration["launches"] <= (most if iteration["draft width"] else 2)
