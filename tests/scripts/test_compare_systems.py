"""Rivals draft with a plan's draft model, and not with its head, of which they know nothing."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from yggdrasil.scheduling.plan import ModelRef

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def compare_systems(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("compare_systems", "llama_cpp"):  # what a name is here, it is not elsewhere
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    return importlib.import_module("compare_systems")


@pytest.mark.parametrize(("source", "is_theirs"), [("tiny/drafter", True), ("heads/smollm2-135m-instruct", False)])
def test_a_head_is_no_draft_model_for_rivals(compare_systems, source, is_theirs):
    model = ModelRef(f"yggdrasil:assets/{source}", "0" * 16, 1)
    assert compare_systems._drafter(SimpleNamespace(drafter=model)) == (model if is_theirs else None)
