"""What a plan for a GPU hands to those who build its pair, and what it cannot be asked for."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from yggdrasil.artifacts import current_machine, plan_path
from yggdrasil.calibration.search import SearchSettings, search_schedules
from yggdrasil.calibration.settings import PairSource
from yggdrasil.errors import YggdrasilError
from yggdrasil.scheduling.plan import Plan

DEMO = next(Path(__file__).parents[2].glob("plans/demo/*.yaml"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_pair_of_a_plan_runs_where_the_plan_says(device):
    assert PairSource.of_plan(replace(Plan.load(DEMO), device=device)).device == device
