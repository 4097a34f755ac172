"""Killed calibrations are resumed, and the judge of killed runs sees what one may do wrong."""

import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import kills
from kills import Killing
from stage import Stage

pytestmark = pytest.mark.slow

# Measures two parts, 0.15 s each, and writes a plan, or decodes by it; FAULT is filled in.
PROGRAM = """
import json, os, shutil, subprocess, sys, time
from pathlib import Path
fault, parts = {fault!r}, Path("profiles/killed/machine.partial")
if sys.argv[1] == "calibrate":
    if fault == "went on":
        subprocess.Popen(["sleep", "60"])
    parts.mkdir(parents=True, exist_ok=True)
    for name in ("threads.csv", "other"):
        if (parts / name).exists() and fault != "made twice":
            continue
        half = Path("half.tmp")
        half.touch()
        time.sleep(0.15)
        (parts / f".{{name}}").write_text(str(time.monotonic_ns()))
        if fault != "left over":
            half.unlink(missing_ok=True)
        (parts / f".{{name}}").rename(parts / name)  # last: killed before it, the next run makes and tidies it again
    Path("plans/killed").mkdir(parents=True, exist_ok=True)
    parts.with_name("machine").mkdir(exist_ok=True)  # a run may be killed behind its plan
    (parts / "threads.csv").rename(parts.with_name("machine") / "threads.csv")
    shutil.rmtree(parts)
    sys.exit(3 if fault == "exit code 3" else 0)
print(json.dumps({{"tokens": [2] if fault == "different tokens" else [1]}}))
"""


@pytest.fixture
def stage(tmp_path):
    return SimpleNamespace(
        sandbox=lambda _: tmp_path, reference={"text": [1]},
        machine_made=lambda folder: {"YGGDRASIL_CACHE": str(folder / "cache")},
    )  # fmt: skip


@pytest.mark.parametrize(
    "fault", ["", "made twice", "went on", "left over", "different tokens", "exit code 3"], ids=lambda f: f or "none"
)
def test_each_fault_of_a_killed_run_is_seen(stage, monkeypatch, fault):
    monkeypatch.setattr(kills, "_LINGER_SECONDS", 0.5)
    monkeypatch.setattr(Killing, "program", PROGRAM.format(fault=fault))

    tally = Killing(stage, Random(0)).run("calibrate --quick", 4, lambda _: None)

    assert tally.kills == 4
    assert tally.completed >= 1
    assert [wrong for wrong in tally.wrong if fault in wrong] if fault else tally.wrong == []


def test_a_calibration_killed_at_any_moment_is_resumed(tmp_path):
    tally = Killing(Stage(tmp_path / "stage"), Random(0)).run("calibrate --quick", 4, print)

    assert tally.wrong == []
    assert tally.completed >= 1
