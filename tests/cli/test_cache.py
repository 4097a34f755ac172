"""``yggdrasil cache`` lists what is compiled and kept of models, and clears it; what took minutes to write stays."""

from pathlib import Path

import huggingface_hub
import pytest
from made_up import write_artifacts
from tiny_pair import random_model
from typer.testing import CliRunner

from yggdrasil.artifacts import model_fingerprint
from yggdrasil.cli.app import make_app
from yggdrasil.drafters.statistics.grown_table import answers_folder
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.scheduling.plan import ModelRef


def invoke(*arguments):
    return CliRunner().invoke(make_app("cache"), arguments)


@pytest.fixture
def two_models(tmp_path, monkeypatch):
    """A cache with compiled steps, two models of which a plan names one, and text that a model wrote."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    for file, size in (
        ("steps/plain-w1-0.pt2", 2_000_000), ("models/0123456789abcdef/packed/tensors.safetensors", 3_000_000),
        ("models/fedcba9876543210/packed/tensors.safetensors", 1_000_000), ("texts/x.jsonl", 10),
    ):  # fmt: skip
        (cache / file).parent.mkdir(parents=True)
        (cache / file).write_bytes(bytes(size))
    write_artifacts(tmp_path, "mine", target=ModelRef("/models/qwen.gguf", "0123456789abcdef", 1))
    return cache


def test_the_cache_is_listed_by_model_and_cleared(two_models):
    listed = invoke("cache")
    assert listed.exit_code == 0
    assert "steps: 1 files, 2.0 MB" in listed.output
    assert "qwen.gguf: 1 files, 3.0 MB" in listed.output
    assert "fedcba9876543210: 1 files, 1.0 MB" in listed.output

    cleared = invoke("cache", "--clear")
    assert cleared.output.endswith("cleared: 6.0 MB\n")
    assert [path.name for path in two_models.iterdir()] == ["texts"]
    assert invoke("cache").output.endswith("in all: 0.0 MB\n")


@pytest.mark.parametrize("name", ["qwen.gguf", "0123456789abcdef"])
def test_what_is_kept_of_one_model_is_cleared_alone(two_models, name):
    assert invoke("cache", name, "--clear").output.endswith("cleared: 3.0 MB\n")
    assert [path.name for path in (two_models / "models").iterdir()] == ["fedcba9876543210"]
    assert (two_models / "steps").exists()

    missing = invoke("cache", "llama")
    assert "nothing is kept of llama; the cache has fedcba9876543210" in str(missing.exception)


def test_counts_of_answers_are_forgotten_of_one_model_or_of_all(two_models, tmp_path):
    random_model().save_pretrained(tmp_path / "target")
    for digits in (model_fingerprint(tmp_path / "target"), "another"):
        Table.of([([], [1, 2])]).save(answers_folder(digits, "full") / "all.safetensors")

    assert "forgot the answers of target" in invoke("cache", "target", "--forget").output
    assert [each.name for each in answers_folder("", "").parent.iterdir()] == [answers_folder("another", "full").name]
    assert "forgot the answers of all models" in invoke("cache", "--forget").output
    assert not any(answers_folder("", "").parent.iterdir())


def test_counts_of_answers_are_forgotten_by_the_name_in_plans(two_models):
    Table.of([([], [1, 2])]).save(answers_folder("0123456789abcdef", "full") / "all.safetensors")

    assert "the cache has qwen.gguf (0123456789abcdef)" in str(invoke("cache", "llama", "--forget").exception)
    assert invoke("cache", "qwen.gguf", "--forget").exit_code == 0
    assert not any(answers_folder("", "").parent.iterdir())


@pytest.mark.parametrize("options", [["--clear"], ["--forget"], ["--clear", "--forget"]])
def test_a_model_is_also_named_by_its_hub_id_which_is_not_downloaded(two_models, tmp_path, monkeypatch, options):
    random_model().save_pretrained(tmp_path / "snapshot")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda _, *, local_files_only, **__: tmp_path / "snapshot"
    )
    digits = model_fingerprint(tmp_path / "snapshot")
    Table.of([([], [1, 2])]).save(answers_folder(digits, "full") / "all.safetensors")
    (two_models / "models" / digits).mkdir()

    assert invoke("cache", "owner/name", *options).exit_code == 0
    assert (two_models / "models" / digits).exists() == (options == ["--forget"])
    assert any(answers_folder("", "").parent.iterdir()) == (options == ["--clear"])


@pytest.mark.parametrize("is_seen", [True, False])
def test_what_another_process_takes_away_meanwhile_stops_no_listing(tmp_path, monkeypatch, is_seen):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "plain-w1-0.pt2").write_bytes(bytes(2_000_000))
    (gone := tmp_path / "steps" / ".plain-w1-1.pt2.01234567.tmp").write_bytes(bytes(1_000_000))
    stat = Path.stat

    def look(path, **options):
        """What is there then, or when it has been looked at, is no more."""
        found = stat(path, **options) if is_seen or path != gone else None
        if path == gone:
            path.unlink()
        return found or stat(path, **options)

    monkeypatch.setattr(Path, "stat", look)
    listed = invoke("cache")

    assert listed.exit_code == 0
    assert ("steps: 2 files, 3.0 MB" if is_seen else "steps: 1 files, 2.0 MB") in listed.output


def test_a_folder_on_another_disk_is_listed_and_cleared_and_stays_linked(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (disk := tmp_path / "disk").mkdir()
    (tmp_path / "cache" / "models").symlink_to(disk)
    (disk / "tensors.safetensors").write_bytes(bytes(3_000_000))

    assert invoke("cache").exit_code == 0
    cleared = invoke("cache", "--clear")
    assert cleared.output.endswith("cleared: 3.0 MB\n")
    assert list(disk.iterdir()) == []
    (tmp_path / "cache" / "models" / "again").mkdir(parents=True)
