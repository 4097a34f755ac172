"""What is checked before anything is measured, and what an interrupted calibration goes on from."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from yggdrasil.artifacts import read_csv, write_atomic, write_csv
from yggdrasil.artifacts.lock import locked
from yggdrasil.calibration import documents, pipeline
from yggdrasil.calibration.calibration_settings import QUICK, CalibrationSettings, PairSource
from yggdrasil.calibration.documents import usable_prompts
from yggdrasil.calibration.measurement.steps import COLUMNS, Sample
from yggdrasil.calibration.pair import check_pair, default_max_length
from yggdrasil.calibration.work_folder import open_part, open_work, read_or_drop
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.cli.calibrate import _shapes
from yggdrasil.drafters.model_free_options import NGramOptions
from yggdrasil.drafters.registry import NamedDrafters
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.prompts import read_prompts
from yggdrasil.scheduling.plan import Shapes, resolve_source

TARGET = resolve_source("yggdrasil:assets/tiny/target")
TARGET_PROMPTS = Path(TARGET).parent / "prompts.jsonl"


def pair(**shapes):
    return PairSource(TARGET, None, "bfloat16", 0, 0, Shapes(**shapes), model_free=(NGramOptions(),))


def test_a_context_that_the_model_lacks_is_refused_and_not_cut():
    assert check_pair(pair(max_length=2048)) is not None
    with pytest.raises(YggdrasilError, match=r"--max-length 4096 is more than the 2048 positions of .*target; give at"):
        check_pair(pair(max_length=4096))
    assert default_max_length(TARGET, None) == default_max_length(TARGET, TARGET) == 2048


def test_unfinished_work_is_kept_for_the_same_calibration_and_dropped_when_damaged(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}")
    settings = CalibrationSettings(pair(), prompts, "mine", tmp_path, QUICK)
    work = open_work(settings)
    part = work / "part"
    part.write_text("whole")
    assert read_or_drop(open_work(settings) / "part", Path.read_text) == "whole"

    def damaged(_: Path) -> str:
        raise ArtifactError("cut off")

    assert read_or_drop(part, damaged) is None
    assert not part.exists()
    part.write_text("whole")
    (work / "settings.json").write_bytes(b"\xff\xfe")
    assert open_work(settings) == work
    assert not part.exists()


def test_work_of_other_versions_is_not_gone_on_with(tmp_path, monkeypatch):
    """The plan would name the versions here beside times that others took."""
    (prompts := tmp_path / "prompts.jsonl").write_text("{}")
    settings = CalibrationSettings(pair(), prompts, "mine", tmp_path, QUICK)
    (open_work(settings) / "part").write_text("whole")
    monkeypatch.setattr("torch.__version__", "1.0")

    assert not (open_work(settings) / "part").exists()


def test_unfinished_work_on_another_disk_is_begun_anew_and_dropped_there(tmp_path):
    (prompts := tmp_path / "prompts.jsonl").write_text("{}")
    settings = CalibrationSettings(pair(), prompts, "mine", tmp_path, QUICK)
    work = open_work(settings)
    shutil.rmtree(work)
    work.symlink_to(tmp_path / "disk")
    for _ in range(2):  # while it is not there, and when it is another's
        disk = open_work(settings)
        assert disk == tmp_path / "disk"
        assert sorted(path.name for path in disk.iterdir()) == ["settings.json"]
        (disk / "settings.json").write_text("of another")
        (disk / "part").touch()
    shutil.rmtree(open_work(settings))  # as when all is done

    assert work.is_symlink()
    assert open_work(settings) == disk


def test_work_on_another_model_in_its_place_is_not_gone_on_with(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TARGET, model)
    (prompts := tmp_path / "prompts.jsonl").write_text("{}")
    settings = CalibrationSettings(replace(pair(), target=str(model)), prompts, "mine", tmp_path, QUICK)
    (open_work(settings) / "part").write_text("whole")
    assert (open_work(settings) / "part").exists()
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert not (open_work(settings) / "part").exists()


@pytest.mark.parametrize(("max_length", "kept", "written"), [(2048, 256, 64), (128, 60, 59), (64, 28, 27)])
def test_a_short_context_is_shared_by_the_prompt_and_what_follows(tmp_path, max_length, kept, written):
    settings = CalibrationSettings(pair(max_length=max_length, max_depth=8), TARGET_PROMPTS, "mine", tmp_path, QUICK)
    assert (settings.prompt_tokens, settings.tokens) == (kept, written)
    texts = usable_prompts(read_prompts(TARGET_PROMPTS), load_tokenizer(TARGET), settings)
    assert max(map(len, texts)) == min(kept, 198)


def test_a_context_without_room_is_refused(tmp_path):
    settings = CalibrationSettings(pair(max_length=63, max_depth=8), TARGET_PROMPTS, "mine", tmp_path, QUICK)
    with pytest.raises(YggdrasilError, match="--max-length 63 leaves no room to calibrate in; give at least 64"):
        usable_prompts(read_prompts(TARGET_PROMPTS), load_tokenizer(TARGET), settings)


def test_a_part_of_the_work_begins_with_what_is_shared_and_goes_on_by_itself(tmp_path):
    (tmp_path / "time").write_text("12")
    (tmp_path / "stages").write_text("the whole's")
    part = open_part(tmp_path, "part", ["time", "missing"])
    assert {file.name: file.read_text() for file in part.iterdir()} == {"time": "12"}

    (part / "time").write_text("34")
    assert open_part(tmp_path, "part", ["time"]) == part
    assert (part / "time").read_text() == "34"


READERS = {
    "settings.json": lambda path: json.loads(path.read_text()),
    "stages-128.csv": lambda path: read_csv(path, "stage-samples", 1),
    "traces-0.safetensors": TraceSet.load,
}


@pytest.mark.parametrize("part", READERS)
@pytest.mark.parametrize("damage", ["cut", "emptied", "noise", "a folder", "a link to a folder", "a link to itself"])
def test_a_damaged_part_is_dropped_and_makes_room_for_a_new_one(tmp_path, part, damage):
    file = tmp_path / part
    if damage == "a folder":
        file.mkdir()
    elif damage == "a link to a folder":
        file.symlink_to(tmp_path)
    elif damage == "a link to itself":
        file.symlink_to(part)
    else:
        file.write_bytes({"cut": b"# yggdrasil kind=", "emptied": b"", "noise": bytes(range(256))}[damage])

    assert read_or_drop(file, READERS[part]) is None
    write_atomic(file, b"new")
    assert file.read_bytes() == b"new"


def read_where_nothing_opens(path):
    """As safetensors does: it calls missing whatever it cannot open."""
    return load_file(path.with_name("missing"))


@pytest.mark.parametrize("read", [*READERS.values(), read_where_nothing_opens])
@pytest.mark.parametrize("reason", ["Input/output error", "Too many open files"])
def test_a_part_that_cannot_be_read_now_is_named_and_stays(tmp_path, monkeypatch, read, reason):
    file = tmp_path / "part"
    file.write_bytes(b"of hours")

    def fail(*_, **__):
        raise OSError(5, reason)

    with monkeypatch.context() as broken:
        for name in ("open", "read_bytes", "read_text"):
            broken.setattr(Path, name, fail)
        with pytest.raises(YggdrasilError, match=rf"part cannot be read \({reason}\) and is left as it is; run again"):
            read_or_drop(file, read)
    assert file.read_bytes() == b"of hours"


@pytest.mark.parametrize(
    ("stages", "is_kept"),
    [(["plain"], False), (["plain", "pass"], True), (["pass", "verify"], False), (["pass", "verify", "grow"], True)],
)
def test_samples_of_an_earlier_version_are_measured_anew(tmp_path, stages, is_kept):
    """They lack passes, or draft steps beside drafted trees."""
    file = tmp_path / "stages-128.csv"
    rows = [Sample(128, 1, int(stage in ("verify", "grow")), 0, 1, stage, 1.0) for stage in stages]
    write_csv(file, "stage-samples", 1, pd.DataFrame(rows, columns=list(COLUMNS)))

    assert read_or_drop(file, pipeline._read_samples) == (rows if is_kept else None)
    assert file.exists() == is_kept


def test_a_pair_that_is_refused_leaves_nothing_behind(tmp_path, monkeypatch):
    def refuse(pair):
        raise YggdrasilError("not this pair")

    monkeypatch.setattr(pipeline, "build_assembly", refuse)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The first of them"}\n' * 4)
    settings = CalibrationSettings(pair(), prompts, "mine", tmp_path / "root", QUICK)

    with pytest.raises(YggdrasilError, match="not this pair"):
        pipeline.calibrate(settings, None)
    assert not (tmp_path / "root").exists()


def test_a_second_process_is_told_who_holds_the_lock_and_a_dead_ones_is_free(tmp_path):
    lock = tmp_path / "x.lock"
    command = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from yggdrasil.artifacts import atomic_directory, read_csv, write_atomic
from yggdrasil.artifacts.lock import locked
with locked(Path({str(lock)!r}), "a calibration"):
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        number = other.stdout.readline().strip()
        with (
            pytest.raises(ArtifactError, match=f"a calibration is under way in process {number}, begun"),
            locked(lock, "a calibration"),
        ):
            pass
        other.kill()
    assert lock.exists(), "killed, it leaves the file"
    with locked(lock, "a calibration"):
        pass
    assert not lock.exists()


def test_quick_leaves_alone_what_was_given_by_hand():
    model, look_up, plain = NamedDrafters("a/model"), NamedDrafters(None, (NGramOptions(),)), NamedDrafters(None)
    shapes = _shapes(512, 4, None, "1,3", model, quick=True)

    assert (shapes.draft_widths, shapes.verify_widths) == ((1, 2, 4), (1, 3))
    assert _shapes(512, 4, None, None, look_up, quick=False).verify_widths == (1, 2, 3, 4, 6, 8, 16, 32, 64)
    assert _shapes(512, 4, None, None, look_up, quick=False).draft_widths == ()
    assert _shapes(512, 4, None, None, plain, quick=False).verify_widths == (1,)
    with pytest.raises(YggdrasilError, match="verify_widths must be ascending"):
        _shapes(512, 4, None, "4,1", look_up, quick=True)
    with pytest.raises(YggdrasilError, match="--draft-widths is for a draft model"):
        _shapes(512, 4, "1,2", None, look_up, quick=True)
    with pytest.raises(YggdrasilError, match="--verify-widths is for drafters"):
        _shapes(512, 4, None, "1,2", plain, quick=True)


def test_progress_of_recording_counts_the_documents_of_both_passes(tmp_path, monkeypatch):
    fractions, knots = [], torch.zeros(1)
    drafter = SimpleNamespace(capabilities=SimpleNamespace(steps=SimpleNamespace(knots=knots)))
    job = SimpleNamespace(
        texts=[[1]] * 6, work=tmp_path, reporter=SimpleNamespace(phase=lambda _: fractions.append),
        assembly=SimpleNamespace(engine=SimpleNamespace(drafter=drafter)),
    )  # fmt: skip
    monkeypatch.setattr(documents, "_document", lambda job, drafter, index, file: file.stem)
    monkeypatch.setattr(documents, "concatenate", list)
    monkeypatch.setattr(documents, "fit_acceptance", lambda first: SimpleNamespace(knots=np.full(1, len(first))))

    traces, _ = documents.record_all(job)

    assert traces == [f"traces-{i}" for i in range(6)]
    assert knots.tolist() == [3.0]  # half of the documents
    assert fractions == pytest.approx([(i + 1) / 9 for i in range(9)])
