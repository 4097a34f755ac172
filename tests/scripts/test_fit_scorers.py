"""The script that fits the usual scorers writes them from a target's own text, and knows what is none."""

import importlib
import json

import numpy as np
import pytest
from tiny_pair import random_model

from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
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

    script.usual(text, tmp_path)

    for name in ("text", "table"):
        scorer = NGramScorer.load(tmp_path / f"{name}.safetensors")
        assert scorer.out.any()
    with pytest.raises(YggdrasilError, match=r"nothing\.jsonl holds no text to learn from"):
        script.usual(tmp_path / "nothing.jsonl", tmp_path)


def test_the_scorer_of_the_shipped_text_learns_from_several_models(script, tmp_path, monkeypatch, capsys):
    """A table is made of each model's own tokens."""
    made = []

    def make_table(tokenizer, file):
        made.append(tokenizer)
        Table.of([((), [1, 2, 3] * 9)]).save(file)

    monkeypatch.setattr(script, "make_table", make_table)
    monkeypatch.setattr(script, "ROUNDS", 1)
    texts = []
    for number, answer in enumerate(([1, 2, 3, 1, 2], [2, 3, 1])):
        folder = tmp_path / f"model{number}"
        random_model().save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps({"prompt": [9], "answer": answer}))
        texts.append(f"{folder}={file}")

    script.shipped_text(texts, tmp_path)

    assert [path.parent.name for path in made] == ["model0", "model1"]
    assert NGramScorer.load(tmp_path / "shipped-text.safetensors").out.any()
    assert capsys.readouterr().out.startswith("6 positions; nats per position before ")  # none is known behind a 9
    with pytest.raises(YggdrasilError, match="absent holds no text to learn from"):
        script.shipped_text([f"{tmp_path / 'model0'}={tmp_path / 'absent'}"], tmp_path)
