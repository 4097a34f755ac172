"""Every option refuses what no one can mean in one sentence that names it, before a model is looked for."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from made_up import write_artifacts
from options import absurd_options, prompt_commands

from yggdrasil.cli.app import make_app
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.errors import YggdrasilError
from yggdrasil.scheduling.plan import ModelRef

ABSURD = list(absurd_options(make_app(), "faults", has_models=False))
TARGET = Path(__file__).parents[2] / "yggdrasil/assets/tiny/target"
TAKES_PROMPTS = list(prompt_commands(make_app(), "faults", str(TARGET)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A plan whose models are nowhere: a command that looks for them first says so, and not what was asked."""
    place = tmp_path_factory.mktemp("options")
    write_artifacts(place, "faults", target=ModelRef("missing", "0", 1), drafters=[ModelRef("missing", "0", 1)])
    write_artifacts(place, "counted", target=ModelRef("missing", "0", 1), drafters=[StatisticsOptions()])
    lines = [json.dumps({"prompt": f"text number {i}"}) for i in range(6)]
    (place / "prompts.jsonl").write_text("\n".join(lines))
    return place


def test_the_walk_finds_every_command_and_option():
    words = {word for case in ABSURD for word in case.arguments[:2]}

    assert {"calibrate", "generate", "chat", "bench", "search", "report", "parity"} <= words
    assert {"--limit", "--temperature", "--max-new-tokens", "--draft-widths", "--json"} <= {
        case.option for case in ABSURD
    }


@pytest.mark.parametrize("option", sorted({case.option for case in ABSURD}))
def test_absurd_values_are_refused_before_a_model_is_loaded(folder, option, monkeypatch, program):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    wrong = []
    for case in (case for case in ABSURD if case.option == option):
        code, _, said = program(*case.arguments)
        is_named = any(name in said for name in case.names)
        if code != 2 or not said.startswith("yggdrasil: ") or not is_named:
            wrong.append(f"{' '.join(case.arguments)[:150]}: {code}, {said.strip()[:150]}")

    assert wrong == []
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("arguments", TAKES_PROMPTS, ids=lambda arguments: " ".join(arguments[:2]))
def test_prompts_are_read_before_a_model_is_loaded(folder, arguments, monkeypatch, program):
    """The plan's models are nowhere, and whoever loads a target says so."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("yggdrasil.runtime.loading.load_model", loading)
    monkeypatch.setattr("yggdrasil.training.training.load_model", loading)
    (folder / "bad.jsonl").write_text("{}\n")
    if arguments[0] == "export":
        arguments = ["export", "counted", "--to", "llama-server", "--url", "http://127.0.0.1:1", "--prompts"]
    more = ["--text"] if arguments[0] == "report" else []

    code, _, err = program(*arguments, "bad.jsonl", *more)

    assert code == 2
    assert "bad.jsonl, line 1" in err


def loading(*arguments, **options):
    raise YggdrasilError("a model is loaded")
