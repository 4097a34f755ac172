"""The judge of killed runs sees what a killed run may do wrong; scripts/inject_faults kills the real ones."""

import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import kills
from kills import Killing, section

# Compiles two steps, 0.15 s each, then decodes; FAULT is filled in.
PROGRAM = """
import json, os, subprocess, sys, time
from pathlib import Path
steps, fault = Path(os.environ["YGGDRASIL_CACHE"], "steps"), {fault!r}
if fault == "went on":
    subprocess.Popen(["sleep", "60"])
for name in "ab":
    manifest = steps / f"{{name}}.json"
    if manifest.exists() and fault != "made twice":
        continue
    half = steps / ".half.tmp"
    half.touch()
    time.sleep(0.15)
    (steps / f"{{name}}.pt2").write_text(name)
    if fault != "left over":
        half.unlink(missing_ok=True)
    manifest.touch()  # last: killed before it, the next run makes and tidies all of it again
for name in "ab":
    assert (steps / f"{{name}}.pt2").exists()
print(json.dumps({{"tokens": [2] if fault == "different tokens" else [1]}}))
sys.exit(3 if fault == "exit code 3" else 0)
"""


@pytest.fixture
def stage(tmp_path):
    (tmp_path / "cache" / "steps").mkdir(parents=True)
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

    tally = Killing(stage, Random(0)).run("a first generate", 4, lambda _: None)

    assert tally.kills == 4
    assert tally.completed >= 1
    assert [wrong for wrong in tally.wrong if fault in wrong] if fault else tally.wrong == []
    assert f"| {tally.kills} | {tally.completed} |" in "\n".join(section({"a first generate": tally}))
