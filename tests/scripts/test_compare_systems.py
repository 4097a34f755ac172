"""Rivals draft with a plan's draft model, and not with its head; what cannot be meant is refused at once."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from yggdrasil.errors import YggdrasilError
from yggdrasil.scheduling.plan import ModelRef

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def compare_systems(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("compare_systems", "llama_cpp"):  # what a name is here, it is not elsewhere
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    return importlib.import_module("compare_systems")


@pytest.mark.parametrize(("source", "is_theirs"), [("tiny/drafter", True), ("heads/smollm2-135m-instruct", False)])
def test_a_head_is_no_draft_model_for_rivals(compare_systems, source, is_theirs):
    model = ModelRef(f"yggdrasil:assets/{source}", "0" * 16, 1)
    assert compare_systems._drafter(SimpleNamespace(drafter=model)) == (model if is_theirs else None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--draft-tokens", "4,many"], "--draft-tokens: '4,many' is not a list of numbers"),
        (["--draft-tokens", "0"], "--draft-tokens 0: 0 is not between 1"),
        (["--json", "{folder}"], "--json: .* is a folder"),
        (["--prompts", "{folder}/none.jsonl"], "--prompts .*none.jsonl cannot be read"),
        (["--prompts", "{folder}/other/some.jsonl"], "some.jsonl and .*some.jsonl are both called some"),
        (["--gguf", "{folder}/none.gguf"], "--gguf .*none.gguf cannot be read"),
        (["--max-prompt-tokens", "0"], "max-prompt-tokens"),
        (["--max-new-tokens", "0"], "max-new-tokens"),
        (["--limit", "0"], "limit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_nobody_can_mean_is_refused_before_a_model_is_opened(compare_systems, tmp_path, options, sentence):
    for folder in (tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        (folder / "some.jsonl").write_text('{"prompt": "text"}\n')
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(compare_systems.main)
    given = ["--plan", "nowhere", "--prompts", str(tmp_path / "some.jsonl")]
    ended = CliRunner().invoke(app, [*given, *(option.format(folder=tmp_path) for option in options)])

    assert isinstance(ended.exception, YggdrasilError) or ended.exit_code == 2
    assert re.search(sentence, f"{ended.exception} {ended.output}")


@pytest.mark.parametrize("weights", ["file", "full"])
def test_blocks_of_a_file_are_compared_on_the_file_alone(compare_systems, monkeypatch, tmp_path, weights):
    """Of dequantised weights llama.cpp has files of its own."""
    file = tmp_path / "model.gguf"
    monkeypatch.setattr(compare_systems.Source, "find", lambda _: SimpleNamespace(gguf=file))
    monkeypatch.setattr(compare_systems, "_folder", lambda model, dtype: "folder")
    plan = SimpleNamespace(target=SimpleNamespace(path=lambda: str(file), weights=weights), drafter=None)
    ways = compare_systems._ways(plan, "bfloat16", [4], [])

    of_file = [way.name for way in ways if way.models == [("--model", str(file))]]
    assert len(of_file) == 1 + len(compare_systems.LOOK_UPS)
    assert all(name.startswith("llama.cpp on model, ") for name in of_file)
    assert len(ways) == len(of_file) * (1 if weights == "file" else 2)
