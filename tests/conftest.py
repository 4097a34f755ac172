"""One thread and no network for every test: tiny models gain nothing from two threads and lose much on a busy machine.

Having this file here also makes ``tiny_pair`` importable from every room.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from tiny_pair import TinyPair, make_pair

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair() -> TinyPair:
    """A pair whose drafter is right now and then; never changed by a test."""
    return make_pair()


@pytest.fixture(scope="session")
def perfect_pair() -> TinyPair:
    """A pair whose drafter is always right, so that every accepted block is as long as it may be."""
    return make_pair(noise=0.0)
