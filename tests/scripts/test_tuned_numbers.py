"""The page of tuned numbers names each with its present value, and no number of these packages is left out."""

import ast
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

import yggdrasil
from yggdrasil.calibration.own_text import Document
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.policy import ObjectivePolicy

PACKAGE = Path(yggdrasil.__file__).parent
PAGE = PACKAGE.parent / "docs" / "tuned-numbers.md"
ROW = re.compile(r"^\| `([\w.]+)` \| ([\d.e+-]+) \| `yggdrasil/([\w/]+)\.py` \|", re.MULTILINE)
NO_NUMBERS = {"SCHEMA_VERSION"}


@pytest.fixture
def tuned():
    return importlib.import_module("tuned")


def numbers(module):
    """Names of what is a number and written in capitals at the top of a module or a class."""
    code = importlib.import_module(f"yggdrasil.{module}")
    body = ast.parse(Path(code.__file__).read_text(encoding="utf-8")).body
    classes = [part for part in body if isinstance(part, ast.ClassDef)]
    for prefix, holder, parts in [("", code, body), *((f"{c.name}.", getattr(code, c.name), c.body) for c in classes)]:
        stored = [node for part in parts if isinstance(part, ast.Assign | ast.AnnAssign) for node in ast.walk(part)]
        names = {node.id for node in stored if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        yield from (
            prefix + name
            for name in names - NO_NUMBERS
            if name.isupper() and type(vars(holder).get(name)) in (int, float)
        )


def test_every_number_of_the_packages_that_decode_is_listed(tuned):
    listed = {(each.module, each.name) for each in tuned.TUNED}
    others = {(module, name) for module, names in tuned.NOT_PLAYED.items() for name in names}
    packages = ("policy", "engine", "engine/targets", "drafters", "drafters/statistics", "tree")
    files = [file for package in packages for file in (PACKAGE / package).glob("*.py")]
    modules = [str(file.relative_to(PACKAGE).with_suffix("")).replace("/", ".") for file in files]
    found = {(module, name) for module in modules if not module.endswith("__init__") for name in numbers(module)}

    assert not listed & others
    assert found == listed | others


def test_the_page_has_the_values_of_the_code(tuned):
    page = PAGE.read_text(encoding="utf-8")
    rows = {(module.replace("/", "."), name): value for name, value, module in ROW.findall(page)}
    assert rows == {(each.module, each.name): f"{each.value:g}" for each in tuned.TUNED}
    for names in tuned.NOT_PLAYED.values():
        assert all(f"| `{name}` |" in page for name in names)


def test_half_and_twice_of_a_number_are_tried_wherever_it_is_used(tuned):
    from yggdrasil.drafters import ngram

    branches = next(each for each in tuned.TUNED if each.name == "_BRANCHES")
    with tuned.changed(branches, 0.5):
        assert ngram._BRANCHES == 2
    assert ngram._BRANCHES == 4
    memory = next(each for each in tuned.TUNED if each.name == "DECAY")
    assert memory.scaled(2.0) == pytest.approx(2 * memory.value - 1)
    with pytest.raises(ZeroDivisionError), tuned.changed(memory, 2.0):
        _ = 1 / 0
    assert memory.value == pytest.approx(0.98)


def test_a_text_is_played_alike_every_time_and_with_another_number_otherwise(tuned):
    script = importlib.import_module("policy_ablation")
    costs = StepCosts(0.0, {}, {width: 1 + 0.05 * width for width in (1, 2, 4, 8)}, 0.05, 1.1)

    def policy(measured):
        return ObjectivePolicy({0: measured}, {}, np.empty(0, dtype=np.float32), None)

    play = script.Play("by hand", [Document([1, 2], [1, 2, 3, 4] * 20)], costs, None, policy)
    usual = play.result("unsteady", 0)
    assert usual == play.result("unsteady", 0)
    assert usual.speed > 1.5
    grant = next(each for each in tuned.TUNED if each.name == "RegretBudget.GRANT")
    with tuned.changed(grant, -10.0):  # closed before it begins
        assert play.result("unsteady", 0).speed < usual.speed
