"""One thread for PyTorch: tiny tensors gain nothing from a second, and a busy machine makes it wait for its turn.

And an empty cache for those that compile.
"""

import pytest
import torch

from yggdrasil.artifacts.cache import cache_root


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory):
    """An empty folder for packages, instead of the user's. Kernels are the user's: each child would compile its own."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "kernels").symlink_to(cache_root() / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YGGDRASIL_CACHE", str(folder))
        yield folder
