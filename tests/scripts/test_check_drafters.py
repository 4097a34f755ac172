"""The table of drafters and families: what is written, kept and said to be wrong."""

import csv

import every_drafter
import pytest
import typer
from check_drafters import main
from every_drafter import Outcome

from yggdrasil.errors import YggdrasilError


def rows_of(table):
    with table.open(newline="") as file:
        return {(row["family"], row["steps"]): row for row in csv.DictReader(file)}


def test_cells_are_written_and_kept(tmp_path, monkeypatch):
    table, tried = tmp_path / "drafters.csv", []

    def check(family, kind, folder, backend):
        tried.append((family, kind, backend))
        if kind == "medusa":
            raise YggdrasilError("it does not fit")
        return Outcome(2.0, 1.5, "sampled tokens differ" if family == "mixtral" else "")

    monkeypatch.setattr(every_drafter, "check", check)
    with pytest.raises(typer.Exit) as ended:
        main(["lfm2"], ["text", "medusa"], None, table)
    assert ended.value.exit_code == 0
    with pytest.raises(typer.Exit) as ended:
        main(["lfm2", "mixtral"], ["mtp", "table"], ["captured"], table, merge=True)

    assert ended.value.exit_code == 1
    assert tried[:3] == [("lfm2", "text", ""), ("lfm2", "medusa", ""), ("lfm2", "text", "cudagraph")]
    found = rows_of(table)
    assert list(found) == [("lfm2", "captured"), ("lfm2", "usual"), ("mixtral", "captured")]
    cells = [found["lfm2", "captured"][kind] for kind in ("text", "table", "medusa", "mtp")]
    assert cells == ["2.0 / 1.5", "2.0 / 1.5", "refused: it does not fit", ""]
    assert found["mixtral", "captured"]["table"] == "wrong: sampled tokens differ"


def test_names_that_there_are_not_are_refused():
    with pytest.raises(YggdrasilError, match="--drafter 'medua' is not there; choose from text"):
        main(["lfm2"], ["medua"])
