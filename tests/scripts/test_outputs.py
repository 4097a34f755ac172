"""Where a script is to write is looked at before it works for an hour."""

import importlib

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
