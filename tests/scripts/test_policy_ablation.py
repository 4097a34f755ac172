"""Recorded trees of a draft model are played by the run-time policy."""

import importlib
import json
from pathlib import Path

import yggdrasil
from yggdrasil.policy.costs import StepCosts

PAIR = Path(yggdrasil.__file__).parent / "assets" / "tiny"


def test_trees_of_a_draft_model_are_recorded_and_played(tmp_path, monkeypatch):
    record, ablation = (importlib.import_module(name) for name in ("record_traces", "policy_ablation"))
    prompts = tmp_path / "prompts.jsonl"
    texts = ("def add(a, b):", "class Stack:", "import math\n", "for index in range(3):")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    record.main([prompts], str(PAIR / "target"), tmp_path / "traces", str(PAIR / "drafter"), 4, 24, 64, "1,4", 3, 1)
    costs = StepCosts(0.0, {}, {width: 1.0 + 0.01 * width for width in (1, 2, 4, 8)}, 0.05, 1.06)
    speeds = {}
    for share in (0.02, 5.0):  # of a plain step, that a step of the draft model takes
        monkeypatch.setattr(ablation, "DRAFT_SHARE", share)
        _, drafted = ablation.plays_of(tmp_path / "traces", costs)
        speeds[share] = drafted.result("steady", 0).speed

    assert speeds[0.02] > 1.2 * speeds[5.0]
