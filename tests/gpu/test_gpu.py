"""Every check of ``checks.py``, where there is a CUDA device."""

import pytest
import torch
from gpu.checks import CHECKS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_gpu(check):
    check()
