"""The script that fits the usual scorers writes them from a target's own text, and knows what is none."""

import importlib
import json

import numpy as np
import pytest

from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.errors import YggdrasilError


@pytest.fixture
def script():
    return importlib.import_module("fit_scorers")


def test_beliefs_are_written_and_know_of_no_runner_up(script, tmp_path, monkeypatch):
    generator, text = np.random.default_rng(0), tmp_path / "own.jsonl"
    phrases = generator.integers(0, 60, (12, 9)).tolist()
    answers = [[token for phrase in generator.choice(12, 6) for token in phrases[phrase]] for _ in range(25)]
    text.write_text("".join(json.dumps({"prompt": [1], "answer": answer}) + "\n" for answer in answers))
    monkeypatch.setattr(script, "ROUNDS", 1)

    script.main(text, tmp_path)

    for name in ("text", "table"):
        scorer = NGramScorer.load(tmp_path / f"{name}.safetensors")
        assert scorer.out.any()
    with pytest.raises(YggdrasilError, match=r"nothing\.jsonl holds no text to learn from"):
        script.main(tmp_path / "nothing.jsonl", tmp_path)
