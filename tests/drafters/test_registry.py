"""Drafters by name: registered ones are made from their options, and ``module:Class`` is a user's own."""

import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from yggdrasil.artifacts import parse_dataclass, to_plain
from yggdrasil.cli import checks
from yggdrasil.drafters import NGramDrafter, NGramOptions
from yggdrasil.drafters.model_free_options import ClassOptions, ModelFreeOptions, StatisticsOptions
from yggdrasil.drafters.protocol import is_model_free
from yggdrasil.drafters.registry import REGISTERED, is_model_free_name, make_drafter, named_drafters, names_of
from yggdrasil.errors import YggdrasilError

OWN = "example_drafter:LastFollowerDrafter"
CLASSES = """
class Lacks:
    name = "lacks"
    def begin(self, tokens): ...

class Dear:
    name, capabilities = "dear", None
    def begin(self, tokens): ...
    def extend(self, tokens, states): ...
    def propose(self, tree, budget): ...
    def cost(self, budget): return [("own", 1)]

class NeedsMore(Dear):
    name, capabilities = "needs more", None
    def __init__(self, size): ...

called = []
def function(): called.append(1)
"""


@pytest.mark.parametrize("name", [*REGISTERED, OWN])
def test_every_name_makes_a_model_free_drafter(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    named = named_drafters([name])

    assert is_model_free_name(name)
    assert named.drafter is None
    assert name in names_of(named.model_free)
    assert all(is_model_free(make_drafter(options)) for options in named.model_free)


@pytest.mark.parametrize("options", [NGramOptions(max_draft_len=3), StatisticsOptions(), ClassOptions(OWN)])
def test_a_plan_keeps_the_options(options):
    holder = make_dataclass("Holder", [("options", ModelFreeOptions)])

    assert parse_dataclass(holder, to_plain(holder(options)), "a test").options == options


def test_a_drafter_is_made_with_its_options():
    made = make_drafter(NGramOptions(max_draft_len=3))

    assert isinstance(made, NGramDrafter)
    assert made.options.max_draft_len == 3


@pytest.mark.parametrize("name", ["some/model", "yggdrasil:smollm2-135m-instruct", "C:/models/one", "a:b:c"])
def test_places_of_models_are_no_classes(name):
    assert not is_model_free_name(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("not_there_at_all:Class", "not_there_at_all:Class cannot be imported .*; run in its folder"),
        ("own_classes:Nothing", "own_classes:Nothing cannot be imported"),
        ("own_classes:Lacks", "own_classes:Lacks lacks .*extend, propose, cost"),
        ("own_classes:function", "own_classes:function is no class"),
        ("own_classes:NeedsMore", r"own_classes:NeedsMore cannot be created without arguments \(TypeError.*'size'"),
        ("own_mistake:Class", r"own_mistake:Class cannot be imported \(SyntaxError"),
        ("own_classes:Dear", "own_classes:Dear has a cost"),
    ],
)
def test_a_class_that_cannot_draft_is_refused_by_name(tmp_path, monkeypatch, name, said):
    (tmp_path / "own_classes.py").write_text(CLASSES)
    (tmp_path / "own_mistake.py").write_text("class Class")
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("own_classes", None)

    with pytest.raises(YggdrasilError, match=said):
        make_drafter(ClassOptions(name))
    assert not getattr(sys.modules.get("own_classes"), "called", []), "nothing but a drafter's class is called"


def test_two_of_ones_own_do_not_draft_together():
    with pytest.raises(YggdrasilError, match="give one of your own"):
        named_drafters(["a:A", "b:B"])


@pytest.mark.parametrize("name", ["plan", "ngram", OWN])
def test_commands_take_names_of_classes(name):
    assert checks.drafter(SimpleNamespace(opts=["--drafter"]), name) == name


@pytest.mark.parametrize("name", ["some/model", "text", ""])
def test_commands_refuse_other_names(name):
    with pytest.raises(YggdrasilError, match=f"--drafter {name} is none of plan, ngram, module:Class"):
        checks.drafter(SimpleNamespace(opts=["--drafter"]), name)
