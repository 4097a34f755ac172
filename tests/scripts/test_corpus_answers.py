"""The script that packs a model's answers as shipped text."""

import importlib
import json
import lzma

from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.scheduling.plan import resolve_source

TARGET = resolve_source("yggdrasil:assets/tiny/target")


def test_answers_are_packed_as_text_without_control_tokens(tmp_path, capsys):
    script, tokenizer = importlib.import_module("corpus_answers"), load_tokenizer(TARGET)
    end, texts = tokenizer.eos_token_id, ["The old town by the sea.\n", "def add(a, b):\n    return a + b"]
    answers = [[*tokenizer(text)["input_ids"], end] for text in texts]
    file, packed = tmp_path / "answers.jsonl", tmp_path / "answers.xz"
    file.write_text(
        "".join(json.dumps({"prompt": [1], "answer": answer}) + "\n" for answer in [*answers, [end], answers[0]])
    )

    script.main(TARGET, file, pack=packed)

    assert json.loads(lzma.decompress(packed.read_bytes())) == [text.strip() for text in texts]
    assert "2 answers" in capsys.readouterr().out
