"""The check of a GPU, on a device that stands in for one: every section, with nothing but what that machine has."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_cuda.py"
ABSENT = ("gguf", "typer", "rich", "pandas", "sklearn")
SECTIONS = ("machine", "float32", "bfloat16", "quantised", "costs 7B", "decodes", "transformers", "attention")


def run(tmp_path, *arguments, check=True):
    """The script where a package that is absent raises ImportError, and no C++ compiler works."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")
    environment = {**os.environ, "CXX": "/bin/false", "YGGDRASIL_CACHE": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check, env=environment, timeout=1600)


@pytest.mark.compiled
def test_every_section_runs_on_a_stand_in(tmp_path):
    out = tmp_path / "out"
    done = run(tmp_path, "--device", "cpu", "--tiny", "--out", out, "--seconds", 1500, check=False)
    sections = json.loads((out / "report.json").read_text())["sections"]

    assert {name: section["status"] for name, section in sections.items()} == dict.fromkeys(SECTIONS, "done")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 60
    assert len(list(out.iterdir())) <= 8
    results = sections["float32"]["results"]
    kinds = "plain", "tree", "drafter", "head", "schedule", "sampled", "rule", "hybrid"
    tokens = [value for name, value in results.items() if name.startswith(kinds)]
    assert len(tokens) >= 10
    assert set(tokens) == {"equal"}
    assert {"T(1), compiled", "T(4), compiled"} <= set(sections["costs 7B"]["results"])
    assert sections["quantised"]["results"]["Q6_K equals"] == "equal"
    compared = [key.split()[0] for key, value in sections["attention"]["results"].items() if isinstance(value, float)]
    assert compared[:3] == ["ours", "sdpa", "flex"]  # outputs are those of the portable operator
    assert "tree egt of 4" in sections["decodes"]["results"]
    assert "transformers assisted" in sections["transformers"]["results"]


def test_shipped_tokens_are_those_of_transformers(tmp_path):
    """The check needs no reference of its own on the machine that it runs on."""
    program = (
        "import sys; sys.path[:0] = ['scripts', 'tests']\n"
        "import json; from cuda_check.models import TOKENS, computed_tokens, prompts, weights_digest\n"
        "shipped = json.loads(TOKENS.read_text())\n"
        "assert shipped['weights'] == weights_digest(), 'run scripts/check_cuda.py --write-tokens'\n"
        "assert [row[:12] for row in shipped['tokens'][:2]] == computed_tokens(prompts()[:2], 12)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=300)


def test_a_file_in_parts_is_joined_when_all_have_come(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from cuda_check import parts

    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(range(256)) * 10)
    first, second, third = parts.split(model, tmp_path / "parts")
    sums, kept = tmp_path / "parts" / parts.SUMS, tmp_path / "kept"

    assert parts.join([first], kept) == "SHA256SUMS is not there: send it with a part"
    assert parts.join([third, sums], kept) == "waits for model.gguf.part1"
    joined = parts.join([second], kept)
    assert joined.read_bytes() == model.read_bytes()
    (kept / second.name).write_bytes(b"x" * 1000)
    assert "is damaged" in parts.join([], kept)


def test_what_fails_is_run_again_in_simpler_settings(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import check_cuda
    from cuda_check.notes import Report

    tried = []

    def process(name, label, arguments, seconds, settings, only):
        tried.append((label, settings.get("CUDA_CHECK_MODE"), list(only)))
        report = Report(arguments.out / "report.json")
        found = {"tree": {"error": "illegal memory access"}, "plain": "equal"} if len(tried) < 3 else {"tree": "equal"}
        report.section(label)["results"] = found
        report.write()
        return "done"

    monkeypatch.setattr(check_cuda, "_process", process)
    check_cuda._run_section("float32", SimpleNamespace(out=tmp_path), 100.0)

    assert tried == [
        ("float32", None, []),
        ("float32, again captured", "captured", ["tree"]),
        ("float32, again eager", "eager", ["tree"]),
    ]
    statuses = [section["status"] for section in Report(tmp_path / "report.json").content["sections"].values()]
    assert statuses == ["faults in tree", "faults in tree", "done"]
