"""What a plan for a GPU hands to those who build its pair, and what it cannot be asked for."""

from pathlib import Path

import pytest
from scheduling.test_plan import made_up_plan

from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.search import SearchSettings, search_schedules
from yggdrasil.cli.progress import PhaseProgress
from yggdrasil.errors import YggdrasilError


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_pair_of_a_plan_runs_where_the_plan_says(device):
    assert PairSource.of_plan(made_up_plan(device=device), Path()).device == device


def test_there_is_no_schedule_to_search_for_a_gpu(tmp_path):
    path = tmp_path / "here.yaml"
    made_up_plan(device="cuda").save(path)

    with pytest.raises(YggdrasilError, match=r"here\.yaml: schedules are searched on a CPU only so far"):
        search_schedules(SearchSettings(str(path), None, force_machine=True), PhaseProgress())
