"""One thread and no network for every test: tiny models gain nothing from two threads and lose much on a busy machine.

Nor does a test depend on how busy it is, or on what ran before. Having this file here also makes ``tiny_pair``
importable from every room.
"""

import os
import signal
import sys
from collections import Counter

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from examples import USUAL
from hypothesis import HealthCheck, Phase, settings
from tiny_pair import TinyPair, make_pair

from yggdrasil.artifacts.cache import cache_root

OWN = ("CXX", "HOME", "PATH", "PYTHON", "XDG_", "YGGDRASIL_", "HF_", "CUDA_", "OMP_")  # variables that commands read

# That module changes PyTorch for good, so tests import it in processes of their own. A result of a class that such a
# process defines would import it here.
sys.modules["other_device"] = None  # type: ignore[assignment]

torch.set_num_threads(1)
# In CI, Hypothesis's own profile draws the same examples each time. A failure is reported as it was found: shrinking it
# takes up to five minutes. pytest --hypothesis-profile=shrinking looks for the smallest example.
settings.register_profile("shrinking", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "usual", settings.get_profile("shrinking"), phases=[Phase.explicit, Phase.reuse, Phase.generate], max_examples=USUAL
)
settings.load_profile("usual")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that compile come first, then those with most tests: of several processes none is left alone at the end."""
    compiling = {item.path for item in items if item.get_closest_marker("compiled")}
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in compiling, -sizes[item.path]))


@pytest.fixture(autouse=True)
def _as_if_alone():
    """PyTorch's random numbers are the same in any order; no test leaves signals or environment variables to others."""
    torch.manual_seed(0)
    before, variables = signal.getsignal(signal.SIGTERM), _variables()
    yield
    signal.signal(signal.SIGTERM, before)
    assert _variables() == variables, "a test, or a module that it imports, changes environment variables"


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(OWN)}


@pytest.fixture(scope="session")
def pair() -> TinyPair:
    """A pair whose drafter is right now and then; never changed by a test."""
    return make_pair()


@pytest.fixture(scope="session")
def perfect_pair() -> TinyPair:
    """A pair whose drafter is always right, so that every accepted block is as long as it may be."""
    return make_pair(noise=0.0)


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory):
    """An empty cache folder for compiled steps; native kernels come from the user's cache, which is not empty."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "kernels").symlink_to(cache_root() / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YGGDRASIL_CACHE", str(folder))
        yield folder
