"""The documented paths from end to end, on a tiny random pair on disk: every token is transformers' own."""

import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from calibrated_pair import NAME, CalibratedPair, calibrate, run_program, write_plan
from own_drafter import Nobody
from transformers import AutoModelForCausalLM, PreTrainedModel

from yggdrasil import Decoder
from yggdrasil.artifacts import read_csv
from yggdrasil.calibration.choose import Gain
from yggdrasil.calibration.own_text import text_file
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.drafters import NGramDrafter
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.prompts import encode_chat, encode_prompt, read_prompts
from yggdrasil.runtime.parity import ParityReport
from yggdrasil.scheduling.plan import Plan
from yggdrasil.tree.shape import TreeShape

pytestmark = pytest.mark.compiled
COUNT = 24
SCRIPTS = str(Path(__file__).parents[1] / "scripts")


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory) -> CalibratedPair:
    """``yggdrasil calibrate --quick`` on two folders."""
    return calibrate(tmp_path_factory.mktemp("end-to-end"))


@pytest.fixture(scope="session")
def decoder(calibrated) -> Decoder:
    return Decoder.from_plan(calibrated.plan)


@pytest.fixture(scope="session")
def reference(calibrated) -> PreTrainedModel:
    """The target as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(calibrated.target, dtype=torch.float32).eval()


@pytest.fixture
def at_root(calibrated, monkeypatch) -> Path:
    """The working directory is where ``calibrate`` wrote, so that names of plans mean those."""
    monkeypatch.chdir(calibrated.root)
    return calibrated.root


def expected(reference, tokens, count=COUNT, eos=None):
    prompt = torch.tensor([tokens])
    settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": eos, "pad_token_id": 0}
    return reference.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, len(tokens) :].tolist()


def test_a_drafter_that_does_not_pay_is_left_out(calibrated, reference, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Gain, "pays", property(lambda gain: False))
    path = write_plan(tmp_path, calibrated.target, calibrated.drafter, calibrated.prompts)
    plan, kept = Plan.load(path), Plan.load(calibrated.plan)

    assert (plan.drafter, plan.left_out.drafter) == (None, kept.drafter)
    assert isinstance(plan.model_free[0], StatisticsOptions)
    assert kept.left_out is None
    assert (plan.shapes.draft_widths, plan.costs[0].draft_ms) == ((), {})
    assert f"left out {plan.left_out.describe()}; --keep-drafter keeps it" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.partial"))
    prompt = list(range(40, 60))
    assert list(Decoder.from_plan(path).generate(prompt, max_new_tokens=COUNT).tokens) == expected(reference, prompt)


@pytest.mark.parametrize("way", ["plan", "tree", "plain"])
def test_a_calibrated_plan_decodes_what_the_target_says(calibrated, decoder, reference, way, monkeypatch):
    if way == "tree":  # the plan's own policy may rest; a fixed tree never does
        monkeypatch.setattr(decoder, "policy", FixedPolicy(TreeShape(2, 2, decoder.plan.shapes.verify_widths[-1])))
    accepted = 0
    for prompt in read_prompts(calibrated.prompts):
        found = decoder.generate(
            prompt.prompt, max_new_tokens=COUNT, ignore_eos=True, speculation=way != "plain"
        )  # fmt: skip
        accepted += found.metrics.accepted
        assert found.tokens == expected(reference, encode_prompt(decoder.tokenizer, prompt))
    assert way == "plan" or (accepted > 0) == (way == "tree")


def test_the_text_is_counted_beside_a_draft_model_and_a_drafter_of_ones_own(calibrated, decoder):
    """What a calibration writes is what decoding opens; an n-gram drafter looks the text up itself."""
    assert decoder.plan.model_free == (StatisticsOptions(table=False),)
    assert isinstance(decoder.assembly.engine.model_free.drafters[0], StatisticsDrafter)
    own = Decoder.from_plan(calibrated.plan, drafter=Nobody())
    assert [each.name for each in own.assembly.engine.model_free.drafters] == ["nobody", "text"]
    look_up = NGramDrafter()
    engine = Decoder.from_plan(calibrated.plan, drafter=look_up).assembly.engine
    assert (engine.drafter, engine.model_free.drafters) == (None, [look_up])


def test_a_stream_is_the_text_piece_by_piece(calibrated, decoder):
    for prompt in read_prompts(calibrated.prompts):
        pieces = list(decoder.stream(prompt.prompt, max_new_tokens=COUNT))

        assert len(pieces) > 1
        assert "".join(pieces) == decoder.generate(prompt.prompt, max_new_tokens=COUNT).text


def test_a_chat_is_answered_in_the_template(decoder, reference):
    turns = [{"role": "user", "content": "Is it an art"}]
    for _ in range(2):
        tokens = expected(reference, encode_chat(decoder.tokenizer, turns), eos=0)
        found = decoder.chat(turns, max_new_tokens=COUNT)

        assert found.tokens == tokens
        assert "".join(decoder.stream_chat(turns, max_new_tokens=COUNT)) == found.text
        turns = [*turns, {"role": "assistant", "content": found.text}, {"role": "user", "content": "or not"}]


def test_the_program_generates(at_root, calibrated, decoder, reference, capsys):
    prompt = read_prompts(calibrated.prompts)[0]
    tokens = expected(reference, encode_prompt(decoder.tokenizer, prompt), eos=0)
    options = [NAME, "--max-new-tokens", COUNT]

    assert run_program("generate", *options, "--prompt", prompt.prompt) == 0
    assert capsys.readouterr().out == decoder.tokenizer.decode(tokens, skip_special_tokens=True) + "\n"
    assert run_program("generate", *options, "--prompts", calibrated.prompts, "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["id"] for record in records] == [str(i) for i in range(6)]
    assert records[0]["tokens"] == tokens


@pytest.mark.parametrize("chat", [False, True])
def test_the_program_compares_with_plain_decoding(at_root, calibrated, chat, capsys):
    wrapped = ["--chat"] if chat else []
    code = run_program(
        "bench", calibrated.plan, "--prompts", calibrated.prompts, "--max-new-tokens", COUNT, "--limit", 4,
        "--json", "bench.json", *wrapped,
    )  # fmt: skip
    record = json.loads((at_root / "bench.json").read_text())

    assert code == 0
    assert record["matched"] == record["prompts"] == 4
    assert record["faults"] == 0
    assert list(record["categories"]) == ["a", "b"]
    assert len(record["samples"]) == 4
    assert "repeats" in capsys.readouterr().out


@pytest.fixture
def eager(monkeypatch):
    """Eager steps do: those that a plan has not would take minutes to compile. Nothing settles before it is timed."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr("bench_systems.SETTLE_SECONDS", 0.0)
    for module in ("calibration.pair", "engine.loading"):
        monkeypatch.setattr(f"yggdrasil.{module}.default_backend", lambda *_, **__: "eager")


@pytest.mark.usefixtures("eager")
def test_a_searched_plan_decodes_the_same_and_is_reported(at_root, calibrated, reference, capsys):
    code = run_program(
        "search", NAME, "--prompts", calibrated.prompts, "--save-as", "searched", "--top", 1, "--limit", 1,
        "--rounds", 1, "--final-rounds", 0, "--max-new-tokens", 16,
    )  # fmt: skip
    (plan,) = (at_root / "plans" / "searched").glob("*.yaml")
    searched = Decoder.from_plan("searched", backend="eager")
    tokens = encode_prompt(searched.tokenizer, read_prompts(calibrated.prompts)[1])

    assert code == 0
    assert Plan.load(plan).search is not None
    assert searched.generate(tokens, max_new_tokens=COUNT, ignore_eos=True).tokens == expected(reference, tokens)
    capsys.readouterr()
    assert run_program("report", "searched", "--text", "--csv", "tables") == 0
    assert "searched" in capsys.readouterr().out
    assert any((at_root / "tables").glob("*.csv"))


def script(monkeypatch, name, *arguments):
    """Run a script as its file does; returns the exit code."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module(name)
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        module.run_script(module.main, name)
    return ended.value.code


@pytest.mark.usefixtures("eager")
def test_a_script_tells_where_the_time_goes(at_root, calibrated, monkeypatch, capsys):
    code = script(
        monkeypatch, "profile_steps", calibrated.plan, "--contexts", "32,64", "--rounds", 1,
        "--prompts", calibrated.prompts, "--out", "profiled",
    )  # fmt: skip
    steps, iterations = (read_csv(at_root / "profiled" / f"{name}.csv", name, 1) for name in ("roofline", "iterations"))

    assert code == 0
    assert {*steps["model"]} == {"target", "drafter"}
    assert {*steps["context"]} == {32, 64}
    assert (steps["ms"] > 0).all()
    assert iterations["share"].sum() == pytest.approx(1.0)
    assert "this machine reads" in capsys.readouterr().out
    (at_root / "empty.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    assert script(monkeypatch, "profile_steps", calibrated.plan, "--prompts", "empty.jsonl") == 2
    assert "empty.jsonl, line 2: the prompt is empty" in capsys.readouterr().err
    assert script(monkeypatch, "profile_steps", calibrated.plan, "--verify-widths", "4,2") == 2
    assert "verify_widths must be ascending" in capsys.readouterr().err


@pytest.mark.usefixtures("eager")
def test_the_program_measures_how_far_wide_passes_are_from_plain_ones(at_root, calibrated, capsys):
    options = [calibrated.plan, "--prompts", calibrated.prompts, "--max-new-tokens", 8]
    assert run_program("parity", *options, "--limit", 2, "--out", ".", "--dump-mismatches", "mismatches.jsonl") == 0

    report = ParityReport.load(at_root, Plan.load(calibrated.plan).dtype)
    assert [width.width for width in report.widths] == list(Plan.load(calibrated.plan).shapes.verify_widths[1:])
    assert all(width.positions == 2 * 8 for width in report.widths)
    assert (at_root / "mismatches.jsonl").read_text() == ""
    assert "tolerance" in capsys.readouterr().out


@pytest.mark.usefixtures("eager")
def test_a_script_compares_rules_and_exactness(at_root, calibrated, monkeypatch, capsys):
    """A mode that does not keep its promise ends the command with 1."""
    run_script = partial(script, monkeypatch, "compare_rules")
    options = [calibrated.plan, "--prompts", calibrated.prompts, "--limit", 2, "--max-new-tokens", 8]
    assert run_script(*options, "--temperatures", "0,0.0", "--json", "rules.json") == 0
    assert "lossless" in capsys.readouterr().out
    rows = json.loads((at_root / "rules.json").read_text())["summary"]
    assert [row["system"] for row in rows].count("match, T=0") == 1
    assert {row["system"]: row["same_as_plain"] for row in rows if row["lossless"]}["match, T=0"] == 2
    assert run_script(*options, "--exactness", "--tolerance", 0.1) == 0
    assert "near ties" in capsys.readouterr().out
    assert run_script(*options, "--temperatures", "0,warm") == 2
    assert "--temperatures 0,warm is not a list of numbers" in capsys.readouterr().err
    rule_systems = importlib.import_module("rule_systems")
    summarise = rule_systems.summarise_systems

    def spoilt(*arguments):
        return [row | {"same_as_plain": row["same_as_plain"] - 1} for row in summarise(*arguments)]

    monkeypatch.setattr(rule_systems, "summarise_systems", spoilt)
    assert run_script(*options, "--exactness", "--tolerance", 0.1) == 1


def test_the_program_trains_a_head(at_root, calibrated, reference):
    """Of its calibration's answers nothing is learned; it wrote others too, and goes on to."""
    source = Source.find(calibrated.target)
    file = text_file(source.fingerprint(), usual_weights(source, "bfloat16", "cpu"))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        for i in range(70):
            lines.write(json.dumps({"prompt": [5, 6 + i, 8], "answer": [10, 11, 12, 13 + i % 5, 14]}) + "\n")
    assert run_program("train", calibrated.target, "--out", "head", "--minutes", 0.02, "--threads", 1) == 0
    head, _ = open_head(at_root / "head", torch.float32)
    assert head.settings.hidden_size == reference.config.hidden_size
    assert "Licence" in (at_root / "head" / "README.md").read_text()


def test_plans_are_listed(at_root, capsys):
    assert run_program("plans", NAME) == 0
    assert "this one" in capsys.readouterr().out
    assert run_program("plans", NAME, "--fits") == 0


START = """
import sys
from yggdrasil import Decoder

text = Decoder.from_plan(sys.argv[1]).generate("Is it an art", max_new_tokens=4, ignore_eos=True).text
slow = ("transformers.modeling_utils", "yggdrasil.runtime.loading", "scipy", "pandas")
print([name for name in slow if name in sys.modules], text)
"""


def test_a_start_from_packages_needs_no_model_code(calibrated, decoder):
    """What they take to import is most of what a person would wait for."""
    command = [sys.executable, "-c", START, str(calibrated.plan)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = decoder.generate("Is it an art", max_new_tokens=4, ignore_eos=True).text

    assert done.stdout == f"[] {expected}\n", done.stderr
