"""The task that lm-eval is given, and what counts as the same."""

import json

import pytest

from yggdrasil.errors import YggdrasilError

PLACE = ("samples_local_choice", 0)


def test_every_document_has_its_own_rest_among_four(tmp_path):
    from check_lm_eval import _write_tasks

    tasks = _write_tasks(tmp_path, 8)

    records = [json.loads(line) for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    assert len(records) == 8
    assert {record["label"] for record in records} == {0, 1, 2, 3}
    assert all(record["choices"][record["label"]] == record["own"] for record in records)
    assert all(len(set(record["choices"])) == 4 for record in records)
    assert sorted(file.name for file in tasks.iterdir()) == ["choice.yaml", "greedy.yaml"]


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([["-4.51", "True"]], "differ by"),
        ([["-4.5", "False"]], "in transformers"),
        (["another text"], "in transformers"),
    ],
)
def test_a_difference_is_a_sentence(ours, said):
    from check_lm_eval import _compare

    theirs = ["a text"] if isinstance(ours[0], str) else [["-4.5", "True"]]
    assert _compare({PLACE: theirs}, {PLACE: theirs}) == 0.0

    with pytest.raises(YggdrasilError, match=said):
        _compare({PLACE: ours}, {PLACE: theirs})
    with pytest.raises(YggdrasilError, match="different documents"):
        _compare({}, {PLACE: theirs})
