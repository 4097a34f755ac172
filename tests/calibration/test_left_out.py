"""A drafter that does not pay is left out: the calibration goes on without it, and says so in the plan."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from yggdrasil.calibration import pipeline
from yggdrasil.calibration.calibration_settings import QUICK, CalibrationSettings, PairSource
from yggdrasil.calibration.statistics.model_free import OWN_TEXT
from yggdrasil.drafters.model_free_options import NGramOptions, StatisticsOptions
from yggdrasil.scheduling.plan import Expectation, LeftOut, ModelRef, Shapes, resolve_source

TARGET, DRAFTER = (resolve_source(f"yggdrasil:assets/tiny/{part}") for part in ("target", "drafter"))
PROMPTS = "The first of them", "In winter the old town", "1 2 3 4 5", "def add(a, b):"
GAVE = Expectation("mean", 1.5, 1.0, 1.2)


@pytest.fixture
def settings(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in PROMPTS))
    pair = PairSource(
        TARGET, DRAFTER, "bfloat16", 0, 0, Shapes(), model_free=(NGramOptions(), StatisticsOptions(table=False))
    )
    return CalibrationSettings(pair, prompts, "mine", tmp_path, QUICK)


@pytest.fixture
def begun(monkeypatch):
    """What was calibrated, and in which folder; the first ends as ``outcome`` says, what comes after it in a plan."""
    calls = []
    monkeypatch.setattr(pipeline, "build_assembly", lambda pair: SimpleNamespace(pair=pair))

    def calibrate(settings, assembly, tokenizer, texts, work, reporter, left_out=None):
        assert assembly.pair == settings.pair
        calls.append((settings, work, left_out, sorted(file.name for file in work.iterdir())))
        (work / OWN_TEXT).write_text("12.5")
        (work / "stages-128.csv").write_text("with the drafter")
        return LeftOut(ModelRef("x", "y", 1), GAVE, GAVE) if len(calls) == 1 else Path("plan")

    monkeypatch.setattr(pipeline, "_calibrate", calibrate)
    return calls


def test_what_does_not_pay_is_left_out(settings, begun):
    """Nothing that was measured beside it is taken over, but the time in which the target wrote text."""
    said = []
    reporter = SimpleNamespace(phase=lambda title: said.append(title) or (lambda share: None))
    plan = pipeline.calibrate(settings, reporter)
    (first, work, _, _), (second, part, left_out, there) = begun

    assert plan == Path("plan")
    assert first == settings
    assert (second.pair.drafter, second.pair.shapes.draft_widths) == (None, ())
    assert (second.pair.target, second.pair.model_free) == (TARGET, (NGramOptions(), StatisticsOptions(table=True)))
    assert left_out.drafter.source == "x"
    assert there == [OWN_TEXT]
    assert part.parent == work
    assert not work.exists()
    assert said == ["leaving out x, which does not reliably pay: 1 ms per token with it, 1 without"]


def test_keeping_it_after_all_goes_on_with_what_was_measured(settings):
    assert replace(settings, keeps_drafter=True).identity() == settings.identity()
