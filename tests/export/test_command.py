"""``yggdrasil export`` from end to end, on a made-up plan."""

import json

import pytest
from calibrated_pair import run_program
from head_files import eagle_config, write_head
from made_up import write_artifacts

from yggdrasil.calibration.own_text import text_file
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.scheduling.plan import ModelRef

COSTS = {"target_ms": {"1": 10.0, "2": 10.5, "33": 26.0}, "drafter_ms": {"1": 0.5, "4": 0.6}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_artifacts(tmp_path)
    write_artifacts(tmp_path, "counted", drafters=[StatisticsOptions()])
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("engine", ["llama-server", "vllm", "sglang"])
def test_options_go_to_standard_output_and_the_rest_beside(folder, capsys, engine):
    arguments = ("made-up", "--costs", "costs.json", "--json", "out.json")

    assert run_program("export", "--to", engine, *arguments) == 0

    said, found = capsys.readouterr(), json.loads((folder / "out.json").read_text())
    assert said.out.strip() == found["command_line"] != ""
    assert found["documents"] in said.err
    assert "not said by these options: a " in said.err
    assert found["costs"]["target_ms"]["33"] == 26.0


def test_a_plan_with_a_head_names_it_to_those_who_take_it(folder, capsys):
    head = write_head(folder / "head", eagle_config(), {})
    write_artifacts(folder, "headed", drafters=[ModelRef(str(head), "1", 1), StatisticsOptions(table=False)])
    arguments = ("export", "headed", "--costs", "costs.json")

    assert run_program(*arguments, "--to", "vllm") == 0
    assert f'"method": "eagle3", "model": "{head}"' in capsys.readouterr().out
    assert run_program(*arguments, "--to", "llama-server") == 2
    assert "no setting for" in (said := capsys.readouterr().err)
    assert "export to vllm or sglang" in said


def test_a_plan_that_counts_is_foreseen_on_what_the_target_wrote(folder, capsys):
    arguments = ("export", "counted", "--to", "llama-server", "--costs", "costs.json")

    assert run_program(*arguments) == 2
    assert "no text" in capsys.readouterr().err

    own = text_file("0", "full")
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(json.dumps({"prompt": [1, 2, 3, 4] * 3, "answer": [1, 2, 3, 4] * 12}))
    assert run_program(*arguments) == 0
    said = capsys.readouterr()
    assert "--spec-type ngram-" in said.out
    assert "1 answers of the target" in said.err


@pytest.mark.parametrize("plan", ["made-up", "counted"])
def test_what_nobody_asked_a_server_for_is_not_said_to_be_its(folder, capsys, plan):
    """Costs are the file's, and text that the target wrote, whatever url is given beside them."""
    own = text_file("0", "full")
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(json.dumps({"prompt": [1, 2, 3, 4] * 3, "answer": [1, 2, 3, 4] * 12}))

    server = ("--url", "http://127.0.0.1:9")  # where nothing answers
    assert run_program("export", plan, "--to", "vllm", "--costs", "costs.json", *server) == 0
    assert server[1] not in capsys.readouterr().err


def test_a_name_without_a_plan_is_said_before_what_else_is_missing(folder, capsys):
    assert run_program("export", "nobody", "--to", "vllm") == 2
    assert "nobody" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--to", "llama-server"), "--costs"),
        (("--to", "vllm", "--url", "http://127.0.0.1:9"), "--costs"),
        (("--to", "vllm", "--costs", "costs.json", "--prompts", "costs.json"), "--url"),
        (("--to", "tgi", "--costs", "costs.json"), "tgi"),
        (("--to", "llama-server", "--url", "http://127.0.0.1:1"), "--drafter-url"),
        (("--to", "vllm", "--costs", "deep.json"), "deep.json"),
        (("--to", "vllm", "--costs", "long.json"), "long.json"),
        (("--to", "vllm", "--costs", "flat.json"), "flat.json"),
    ],
)
def test_what_is_missing_or_damaged_is_named(folder, capsys, arguments, named):
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "long.json").write_text(f'{{"target_ms": {{"1": 1.0, "{"9" * 5000}": 2.0}}}}')
    (folder / "flat.json").write_text('{"target_ms": {"1": 1.0, "2": NaN}}')
    assert run_program("export", "made-up", *arguments) == 2
    assert named in capsys.readouterr().err


def test_a_server_of_a_draft_model_that_the_plan_has_not_is_refused(folder, capsys):
    urls = ("--url", "http://127.0.0.1:1", "--drafter-url", "http://127.0.0.1:1")

    assert run_program("export", "counted", "--to", "llama-server", *urls) == 2
    assert "--drafter-url" in capsys.readouterr().err
