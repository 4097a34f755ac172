"""``yggdrasil cache`` lists what is compiled and kept of models, and clears it; what took minutes to write stays."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from yggdrasil.cli.app import app


def test_the_cache_is_listed_and_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "plain-w1-0.pt2").write_bytes(bytes(2_000_000))
    (tmp_path / "models" / "0123" / "packed-bfloat16-full").mkdir(parents=True)
    (tmp_path / "models" / "0123" / "packed-bfloat16-full" / "tensors.safetensors").write_bytes(bytes(3_000_000))
    (tmp_path / "texts").mkdir()

    listed = CliRunner().invoke(app, ["cache"])
    assert listed.exit_code == 0
    assert "plain-w1-0.pt2" in listed.output
    assert "steps: 1 files, 2.0 MB" in listed.output
    assert "models: 1 files, 3.0 MB" in listed.output

    cleared = CliRunner().invoke(app, ["cache", "--clear"])
    assert cleared.output.endswith("cleared: 5.0 MB\n")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
    assert CliRunner().invoke(app, ["cache"]).output.endswith("in all: 0.0 MB\n")


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
    listed = CliRunner().invoke(app, ["cache"])

    assert listed.exit_code == 0
    assert ("steps: 2 files, 3.0 MB" if is_seen else "steps: 1 files, 2.0 MB") in listed.output


def test_a_folder_on_another_disk_is_listed_and_cleared_and_stays_linked(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (disk := tmp_path / "disk").mkdir()
    (tmp_path / "cache" / "models").symlink_to(disk)
    (disk / "tensors.safetensors").write_bytes(bytes(3_000_000))

    assert f"models: 1 files, 3.0 MB in {disk}" in CliRunner().invoke(app, ["cache"]).output
    cleared = CliRunner().invoke(app, ["cache", "--clear"])
    assert cleared.output.endswith("cleared: 3.0 MB\n")
    assert list(disk.iterdir()) == []
    (tmp_path / "cache" / "models" / "again").mkdir(parents=True)
