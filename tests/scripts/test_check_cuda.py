"""The accelerator check, as far as a machine without an accelerator goes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import check_cuda
import cuda_sections


@pytest.mark.compiled
def test_everything_of_a_pair_is_measured(tmp_path):
    notes = cuda_sections.Notes(tmp_path / "pair.json", deadline=float("inf"))
    cuda_sections.pair(notes, "llama3-8b", "cpu", tiny=True)
    results = json.loads((tmp_path / "pair.json").read_text())

    faults = {key: value for key, value in results.items() if isinstance(value, dict) and "error" in value}
    assert faults == {}
    decoded = {key: value for key, value in results.items() if key.startswith("decode")}
    assert len(decoded) == 9
    own = [value for key, value in decoded.items() if "transformers" not in key and "skipped" not in value]
    assert len(own) >= 7
    assert all(value["tokens_as_plain"] == [6] for value in own)
    assert all(share > 0 for share in results["bandwidth_share"].values())


def test_a_failure_or_too_little_time_loses_one_measurement(tmp_path):
    notes = cuda_sections.Notes(tmp_path / "notes.json", deadline=float("inf"))
    notes.attempt("wrong", lambda: [][0])
    notes.attempt("right", lambda: 3)
    notes.attempt("long", lambda: 4, seconds=float("inf"))
    late = cuda_sections.Notes(tmp_path / "late.json", deadline=0.0)
    late.attempt("late", lambda: 5)

    results = json.loads((tmp_path / "notes.json").read_text())
    assert results["wrong"]["error"].startswith("IndexError")
    assert results["right"] == 3
    assert "skipped" in json.loads((tmp_path / "late.json").read_text())["late"]


@pytest.mark.parametrize("ending", ["timeout", "crash", "fault", "good"])
def test_a_section_that_ends_badly_keeps_what_it_noted(tmp_path, monkeypatch, ending):
    def run(command, **options):
        name = command[command.index("--section") + 1]
        noted = {"a": 1, "b": {"error": "ValueError: no"}} if ending == "fault" and name == "tests" else {"a": 1}
        (tmp_path / f"{name}.json").write_text(json.dumps(noted))
        if name == "tests" and ending == "timeout":
            raise subprocess.TimeoutExpired(command, 1.0)
        return SimpleNamespace(returncode=-11 if name == "tests" and ending == "crash" else 0)

    monkeypatch.setattr(check_cuda.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["check_cuda.py", "--out", str(tmp_path), "--sections", "environment", "tests"])
    code = check_cuda.main()
    sections = json.loads((tmp_path / "check_cuda.json").read_text())["sections"]

    assert sections["tests"]["results"]["a"] == sections["environment"]["results"]["a"] == 1
    assert sections["environment"]["status"] == "done"
    expected = {
        "timeout": "stopped after",
        "crash": "failed with exit code -11",
        "fault": "faults in b",
        "good": "done",
    }
    assert sections["tests"]["status"].startswith(expected[ending])
    assert code == (0 if ending == "good" else 1)
