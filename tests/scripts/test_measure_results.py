"""What is measured for the results page, in which order, and what is not measured twice."""

import importlib
import json
import sys
from argparse import Namespace
from collections import Counter
from itertools import pairwise

import pytest

from yggdrasil.bench.record import provenance


@pytest.fixture
def script():
    return importlib.import_module("measure_results")


@pytest.fixture
def prompts(tmp_path):
    """Spec-Bench in small: two categories, one after the other."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    lines = [{"id": f"{kind}{i}", "category": kind, "prompt": "Hello"} for kind in ("qa", "rag") for i in range(4)]
    (folder / "spec_bench.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def tasks(script, prompts, name="smollm2", **options):
    given = Namespace(prompts=prompts, llama_cpp=None, python_engines=None, **options)
    return list(script._tasks(name, "models/x", given, [], prompts.parent / "work"))


def test_every_set_and_every_kind_is_measured(script, prompts):
    kinds = Counter(task.out.stem.partition("-")[0] for task in tasks(script, prompts))

    assert kinds == {"bench": 5, "systems": 5, "turns": 1, "first": 1}
    assert sum(effort.equality for effort in script.EFFORTS.values()) == 100  # in float32, of the weights as they are
    assert all(task.command[-2:] == ["--json", str(task.out)] for task in tasks(script, prompts))


def test_passes_are_compared_where_llama_cpp_is(script, prompts):
    def compared(name, llama_cpp):
        given = Namespace(prompts=prompts, llama_cpp=llama_cpp, python_engines=None)
        found = script._tasks(name, "models/x", given, [], prompts.parent / "work")
        return [task for task in found if task.out.name == "steps.json"]

    (task,) = compared("smollm2-bf16", prompts / "llama.cpp")
    assert task.command[task.command.index("--llama-cpp") + 1] == str(prompts / "llama.cpp")
    assert "models/x" in task.command
    assert compared("smollm2-1B", prompts / "llama.cpp")
    assert not compared("smollm2", prompts / "llama.cpp")
    assert not compared("smollm2-bf16", None)


def test_plans_of_other_drafters_are_made_once_and_decoded_beside_the_models_own(
    script, prompts, tmp_path, monkeypatch
):
    """Quickly and in the user's cache: the checkout keeps what its tables show."""
    begun = []
    monkeypatch.setattr(script, "_run", lambda command, **_: begun.append(command) or "ngram" not in command)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("YGGDRASIL_CACHE", raising=False)
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: Namespace(returncode=1))
    besides = ["smollm2=text", "smollm2=ngram", "smollm2=yggdrasil:mine,table"]
    models = ["--models", "smollm2=models/x", "--prompts", str(prompts), "--beside", *besides]
    monkeypatch.setattr(sys, "argv", ["measure_results", *models])
    with pytest.raises(SystemExit) as ended:
        script.main()
    made = [command[command.index("--name") + 1 :] for command in begun if "calibrate" in command]
    benches = [command for command in begun if "bench" in command]

    quickly = ["--quick", "--root", str(tmp_path / "cache/yggdrasil/artifacts")]
    assert made == [
        ["smollm2", "--root", str(tmp_path)],
        ["smollm2-text", "--drafter", "text", *quickly],
        ["smollm2-ngram", "--drafter", "ngram", *quickly],
        ["smollm2-mine-table", "--drafter", "yggdrasil:mine", "--drafter", "table", "--keep-drafter", *quickly],
    ]
    assert ended.value.code == 1, "one could not be made; the others are measured"
    assert len(benches) == 5
    for command in benches:
        assert [after for word, after in pairwise(command) if word == "--beside"] == [
            "smollm2-text", "smollm2-mine-table"
        ]  # fmt: skip


def test_larger_models_are_measured_on_fewer_prompts(script):
    small, middle, large = (script.EFFORTS[name] for name in ("smollm2", "smollm2-342M", "smollm2-1B"))

    assert small.chat > middle.chat > large.chat
    assert small.others >= middle.others > large.others


def test_few_prompts_are_of_every_category(script, prompts):
    picked = script._picked(prompts / "spec_bench.jsonl", 3, prompts.parent / "picked")

    assert picked.name == "spec_bench.jsonl"
    assert [json.loads(line)["id"] for line in picked.read_text().splitlines()] == ["qa0", "rag0", "qa1"]


@pytest.mark.parametrize(
    ("record", "state"),
    [
        ({}, "done"),
        ({"complete": False}, "begun"),
        ({"summary": []}, "begun"),
        ({"commit": "0" * 40}, "old"),
        ({"commit": None}, "old"),
        ({"commit": "HEAD+"}, "old"),
    ],
)
def test_what_is_there_is_told_apart(script, tmp_path, record, state):
    task = script.Task(1.0, tmp_path / "bench-c4.json", [])
    assert task.state(script.CurrentCommits()) == "missing"
    task.out.write_text(json.dumps({"commit": "HEAD", **record}))
    is_clean = not str(provenance()["commit"]).endswith("+")

    assert task.state(script.CurrentCommits()) == (state if is_clean else "old")


def test_the_longest_runs_first_and_one_failure_stops_nothing(script, prompts, tmp_path, monkeypatch, capsys):
    begun = []

    def run(command, **_):
        begun.append(command)
        return "turns" not in command

    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "_run", run)
    monkeypatch.setattr(script, "_calibrated", lambda *_, **__: True)
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(
        sys, "argv", ["measure_results", "--models", "smollm2=models/x", "tiny=y", "--prompts", str(prompts)]
    )
    with pytest.raises(SystemExit) as ended:
        script.main()

    minutes = {str(task.out): task.minutes for name in ("smollm2", "tiny") for task in tasks(script, prompts, name)}
    order = [minutes[command[-1]] for command in begun]
    assert ended.value.code == 1
    assert order == sorted(minutes.values(), reverse=True)
    assert capsys.readouterr().err.count("FAILED: profiles/") == 2
