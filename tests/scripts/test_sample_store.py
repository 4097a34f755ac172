"""Samples on disk: an interrupted comparison goes on, another one's file is refused."""

import json
from dataclasses import replace

import pytest
from bench_systems import Continuation
from made_up import write_artifacts
from sample_store import SampleFile, measure, pair_settings

from yggdrasil.errors import YggdrasilError
from yggdrasil.scheduling.plan import Plan

SETTINGS = {"dtype": "float32", "budgets": (8, 16)}
PROMPTS = {"a": [1], "b": [2], "c": [3]}


class Counting:
    family, is_plain = "one", True

    def __init__(self, name, fails_at=None):
        self.name, self.read_prompts, self._fails_at = name, [], fails_at

    def decode(self, prompt, max_new_tokens):
        if prompt == self._fails_at:
            raise KeyboardInterrupt
        self.read_prompts.append(prompt)
        return Continuation([7] * max_new_tokens, 1.0, 2.0, 3, 2)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr("bench_systems.SETTLE_SECONDS", 0.0)


def test_an_interrupted_comparison_goes_on(tmp_path):
    path, reported = tmp_path / "out.json", []
    with pytest.raises(KeyboardInterrupt):
        measure([Counting("x"), Counting("y", [2])], PROMPTS, 4, SampleFile(path, SETTINGS), reported.append)
    assert reported == [1 / 3]

    systems = [Counting("x"), Counting("y")]
    file = SampleFile(path, SETTINGS)
    samples = measure(systems, PROMPTS, 4, file, reported.append)
    file.save([{"system": "x"}])

    assert systems[0].read_prompts == [[2], [2], [2], [3], [3]]  # what is left: the first once more, each to warm up
    assert sorted((s.prompt, s.system) for s in samples) == [(p, s) for p in "abc" for s in "xy"]
    record = json.loads(path.read_text())
    assert len(record["samples"]) == 6
    assert record["summary"] == [{"system": "x"}]
    assert {"machine", "python", "versions", "commit", "settings"} <= set(record)
    again = [Counting("x"), Counting("y")]
    assert measure(again, PROMPTS, 4, SampleFile(path, SETTINGS), reported.append) == samples
    assert again[0].read_prompts == []


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "out.json"
    SampleFile(path, SETTINGS).save([])
    with pytest.raises(YggdrasilError, match=r"other settings \(budgets, dtype\); remove it or name another file"):
        SampleFile(path, {"dtype": "bfloat16", "budgets": (8,)})
    kept = {"settings": {}, "samples": [{"prompt": "a"}]}
    for text in (
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"settings": 3, "samples": []}',
        json.dumps(kept).encode(),
    ):
        path.write_bytes(text)
        with pytest.raises(YggdrasilError, match="holds no comparison; remove it or name another file"):
            SampleFile(path, SETTINGS)


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = SampleFile(None, SETTINGS)
    measure([Counting("x")], PROMPTS, 4, file, lambda _: None)
    file.save([])

    assert len(file.samples) == 3
    assert list(tmp_path.iterdir()) == []


def test_samples_of_other_texts_under_the_same_names_are_refused(tmp_path):
    path = tmp_path / "out.json"
    measure([Counting("x")], {"a": [1], "b": [2]}, 4, SampleFile(path, SETTINGS), [].append)
    before = path.read_bytes()
    again = Counting("x")
    with pytest.raises(YggdrasilError, match=r"was measured on other prompts \(b is not what it was\); remove it"):
        measure([again], {"a": [1], "b": [3], "c": [2]}, 4, SampleFile(path, SETTINGS), [].append)
    assert again.read_prompts == []
    assert path.read_bytes() == before
    measure([again], {"a": [1], "c": [3]}, 4, SampleFile(path, SETTINGS), [].append)
    assert [3] in again.read_prompts
    assert [1] not in again.read_prompts


def test_another_calibration_under_a_plans_name_is_another_setting(tmp_path):
    plan = Plan.load(write_artifacts(tmp_path))
    recalibrated = replace(plan, costs=[replace(plan.costs[0], plain_ms=plan.costs[0].plain_ms * 2)])
    assert pair_settings(plan, "float32") == pair_settings(replace(plan), "float32")
    assert pair_settings(plan, "float32") != pair_settings(recalibrated, "float32")
