"""``yggdrasil plans``: short names of this machine's plans, what is wrong with a name, and how models are named."""

from dataclasses import replace

import pytest
from made_up import write_artifacts

from yggdrasil.artifacts import current_machine
from yggdrasil.cli import with_model_first
from yggdrasil.scheduling.plan import ModelRef, Plan


@pytest.fixture
def run(monkeypatch, program, tmp_path):
    """Run the program where two plans are; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("YGGDRASIL_CACHE", raising=False)
    monkeypatch.setattr("yggdrasil.artifacts.names._PACKAGE_ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    write_artifacts(tmp_path, "mine", target=ModelRef("/models/qwen.gguf", "0", 1))
    (path,) = (tmp_path / "plans" / "mine").glob("*.yaml")
    other = replace(Plan.load(path), name="theirs", machine=replace(current_machine(), cores=99))
    (tmp_path / "plans" / "theirs").mkdir()
    other.save(tmp_path / "plans" / "theirs" / f"{other.machine.slug}.yaml")
    return program


def test_plans_are_a_table_of_short_names(run):
    code, out, err = run("plans")
    assert code == 0
    assert "mine" in out
    assert "qwen.gguf" in out
    assert current_machine().cpu not in out
    assert "theirs" not in out
    assert "of other machines: theirs" in err
    assert "theirs" in run("plans", "theirs")[1]


def test_a_plan_is_removed_with_what_was_measured_for_it(run, tmp_path):
    (path,) = (tmp_path / "plans" / "mine").glob("*.yaml")
    for kind in ("profiles", "predictors"):
        (tmp_path / kind / "mine" / path.stem).mkdir(parents=True, exist_ok=True)
    saved = replace(Plan.load(path), name="saved")  # as a search saves it, with the predictor of the first
    (tmp_path / "plans" / "saved").mkdir()
    saved.save(tmp_path / "plans" / "saved" / path.name)

    code, out, err = run("plans", "mine", "--remove")

    assert (code, err) == (0, "")
    assert out.startswith("removed plans/mine/")
    assert not path.parent.exists()
    assert not (tmp_path / "profiles" / "mine").exists()
    assert (tmp_path / "predictors" / "mine").exists(), "the saved plan reads it"
    assert run("plans", "saved", "--remove")[0] == 0
    for name, said in ((None, "--remove needs the NAME of a plan"), ("theirs", "a plan of other machines alone")):
        code, out, err = run("plans", *([name] if name else []), "--remove")
        assert (code, out) == (2, "")
        assert said in err


def test_a_name_without_a_plan_is_a_fault(run):
    code, out, err = run("plans", "mien")
    assert (code, out) == (2, "")
    assert "there is no plan named 'mien' (did you mean 'mine'?); the plans are: mine, theirs" in err
    assert run("plans", "nosuch")[0] == 2


@pytest.mark.parametrize("command", ["bench", "report", "search", "calibrate", "parity"])
def test_a_model_is_the_first_argument(run, command, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    more = ["--text"] if command == "report" else ["--prompts", "prompts.jsonl"]
    code, _, err = run(command, "nowhere", *more)
    assert code == 2
    assert "nowhere" in err.splitlines()[-1]
    assert "MODEL" in run(command, *more)[2]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["bench", "--limit", "2", "--plan", "mine"], ["bench", "mine", "--limit", "2"]),
        (["report", "--name=mine", "--text"], ["report", "mine", "--text"]),
        (["calibrate", "model", "--name", "mine"], ["calibrate", "model", "--name", "mine"]),
        (["search", "--profile"], ["search", "--profile"]),
        ([], []),
    ],
)
def test_options_that_named_the_model_are_still_taken(given, meant, capsys):
    assert with_model_first(given) == meant
    assert ("write `yggdrasil" in capsys.readouterr().err) == (given != meant)
