"""One thread for PyTorch: tiny tensors gain nothing from a second, and a busy machine makes it wait for its turn."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
