"""Damaged files, absurd options and broken surroundings: a command gives the right output or one sentence.

YGGDRASIL_FAULT_SEEDS=80 scripts/test --all tests/faults injects 80 faults of each kind instead of 2. A kind and a seed
make a case again. The judge itself is tested below.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forked import Outcome, Run, Server
from kinds import KINDS, Kinds
from stage import NAME, TEXTS, Stage, generate
from verdict import GOOD, REFUSED, RIGHT, judge

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def kinds(server, tmp_path_factory):
    return Kinds(Stage(tmp_path_factory.mktemp("faults")), server)


SEEDS = range(1, 1 + int(os.environ.get("YGGDRASIL_FAULT_SEEDS", "2")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_gives_the_right_output_or_one_sentence(kinds, server, kind, seed):
    case = kinds.make(kind, seed)

    outcome = server.run(case.run)

    assert case.verdict(outcome) in GOOD, f"{case.done}\n{outcome.err}"


def test_runs_on_eager_steps_compile_none(kinds, server):
    folder = kinds.stage.sandbox("eager")
    environment = {"YGGDRASIL_CACHE": str(folder / "cache")}

    outcome = server.run(Run("eager", generate(NAME, "--prompt", TEXTS[0]), str(folder), environment))

    assert outcome.code == 0, outcome.err
    assert not list((folder / "cache").glob("steps/*"))


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import time; time.sleep(600)", "hang"),
        ("raise KeyError('x')", "traceback"),
        ("raise SystemExit(3)", "exit code 3"),
        ("raise SystemExit(2)", "no sentence"),
        ("print('not ours', file=sys.stderr); raise SystemExit(2)", "more than a sentence"),
        ("print('yggdrasil: no', file=sys.stderr); raise SystemExit(2)", "names neither"),
        ("print('yggdrasil: the file x', file=sys.stderr); raise SystemExit(2)", REFUSED),
        ("pass", RIGHT),
    ],
)
def test_the_judge_sees(server, tmp_path, body, verdict):
    seconds = 1.0 if verdict == "hang" else 60.0
    outcome = server.run(Run("python", [f"import sys; {body}"], str(tmp_path), timeout=seconds))

    assert judge(outcome, ["file x"], None).startswith(verdict)


def test_the_judge_sees_another_output():
    assert judge(Outcome(0, None, False, "out", "", 0.1), [], "different tokens") == "different tokens"
