"""Drafters on hybrids and mixtures; ``scripts/check_drafters.py`` tries each kind on each family."""

import pytest
from every_drafter import check, kinds_of
from examples import ALL

FAMILIES = ("lfm2", "qwen3_5", "falcon_h1", "gpt_oss", "gemma4")  # of each recurrence, and attention unlike others'
FEW = (
    ("gpt_oss", "eagle 3"), ("lfm2", "draft model + text"), ("falcon_h1", "medusa"), ("falcon_h1", "own, of states"),
    ("qwen3_5", "mtp + text"), ("qwen3_5", "draft model, k-ary"), ("gpt_oss", "eagle 1"), ("gpt_oss", "table"),
    ("gemma4", "eagle 1"), ("lfm2", "z-lab"),
)  # fmt: skip
EVERY = tuple((family, kind) for family in FAMILIES for kind in kinds_of(family))
KNOW_NOTHING = ("text", "ngram", "own", "eagle 3")  # of a text that does not repeat itself


@pytest.mark.parametrize(("family", "kind"), EVERY if ALL else FEW)
def test_no_token_changes_in_trees_of_all_shapes(family, kind, tmp_path):
    found = check(family, kind, tmp_path)

    assert not found.fault
    assert found.greedy > 1 or kind.startswith(KNOW_NOTHING)
    assert found.drawn > 1 or kind.startswith(KNOW_NOTHING)
