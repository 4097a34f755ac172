"""Where a script is to write is looked at before it works for an hour."""

import importlib
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from yggdrasil.errors import YggdrasilError

GIVEN = {
    "check_constraints": ["--prompts", "none.jsonl"],
    "check_equality": ["--prompts", "none.jsonl"],
    "check_export": ["--plan", "nowhere", "--prompts", "none", "--llama-cpp", "none"],
    "compare_steps": ["none", "--llama-cpp", "none"],
    "measure_waiting": ["first-contact", "none"],
}


@pytest.mark.parametrize(("script", "given"), GIVEN.items(), ids=list(GIVEN))
def test_a_json_that_cannot_be_written_is_refused_before_anything_is_opened(script, given, tmp_path):
    module = importlib.import_module(script)
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(module.main)

    ended = CliRunner().invoke(app, [*given, "--json", str(tmp_path)])

    assert isinstance(ended.exception, YggdrasilError)
    assert f"--json: {tmp_path} is a folder" in str(ended.exception)


SCRIPTS = [path for path in (Path(__file__).parents[2] / "scripts").iterdir() if path.is_file()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_runs_as_it_says_itself(path):
    """What its own text begins a command with can be run, and only programs that name their interpreter can."""
    text = path.read_text(encoding="utf-8")
    is_run = re.search(rf"^ +(\$ )?scripts/{re.escape(path.name)}\b(?!\.)", text, re.MULTILINE) is not None

    assert bool(path.stat().st_mode & 0o100) == text.startswith("#!")
    assert text.startswith("#!") or not is_run
