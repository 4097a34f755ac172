"""What a plan for a GPU hands to those who build its pair."""

from pathlib import Path

import pytest
from scheduling.test_plan import made_up_plan

from yggdrasil.calibration.calibration_settings import PairSource


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_pair_of_a_plan_runs_where_the_plan_says(device):
    assert PairSource.of_plan(made_up_plan(device=device), Path()).device == device
