"""Strict parsing: what was written is read back, and each fault is named."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.artifacts.parsing import parse_dataclass
from yggdrasil.artifacts.plain import to_plain, yaml_text
from yggdrasil.errors import ArtifactError


@dataclass(frozen=True)
class Stage:
    name: str
    width: int
    cost_ms: float
    policy: Literal["chain", "tree"] = "tree"


@dataclass(frozen=True)
class Plan:
    stages: tuple[Stage, ...]
    widths: list[int]
    head: Stage | None
    verify_ms: dict[int, float]
    span: tuple[int, float]
    is_strict: bool = True
    depth: int | str = "auto"
    source: Path = Path("x")
    notes: dict[str, list[str]] = field(default_factory=dict)


finite = st.floats(allow_nan=False)
stages = st.builds(Stage, st.text(), st.integers(), finite, st.sampled_from(["chain", "tree"]))
plans = st.builds(
    Plan,
    stages=st.lists(stages, max_size=3).map(tuple),
    widths=st.lists(st.integers(), max_size=4),
    head=st.none() | stages,
    verify_ms=st.dictionaries(st.integers(), finite, max_size=4),
    span=st.tuples(st.integers(), finite),
    is_strict=st.booleans(),
    depth=st.integers() | st.text(),
    source=st.text(alphabet="abc./", min_size=1).map(Path),
    notes=st.dictionaries(st.text(), st.lists(st.text(), max_size=2), max_size=2),
)


@examples(50)
@given(plans)
def test_round_trip_through_yaml(plan: Plan) -> None:
    text = yaml_text(to_plain(plan))

    assert parse_dataclass(Plan, yaml.safe_load(text), "x.yaml") == plan


ABSENT = object()


def good() -> dict[str, Any]:
    stage = {"name": "draft", "width": 4, "cost_ms": 1.5}
    return {"stages": [stage], "widths": [1, 4], "head": None, "verify_ms": {1: 2.0}, "span": [1, 2]}


def test_defaults_and_whole_numbers_for_floats() -> None:
    plan = parse_dataclass(Plan, good(), "x.yaml")

    assert plan.depth == "auto"
    assert plan.stages == (Stage("draft", 4, 1.5),)
    assert type(plan.span[1]) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify_mss": 1}, "x.yaml: unknown key 'verify_mss' (did you mean 'verify_ms'?); remove or rename it."),
        ({"spages": [1, 2], "span": ABSENT}, "unknown key 'spages' (did you mean 'span'?)"),  # absent; more like stages
        ({"head": ABSENT}, "x.yaml: key 'head' is missing; add it or create the file again."),
        ({"qqq": 1}, "x.yaml: unknown key 'qqq'; remove or rename it."),
        ({3: 1}, "x.yaml: unknown key '3'; remove or rename it."),
        ({"widths": "1,4"}, "x.yaml: key 'widths' should be a list, but is '1,4' (text)."),
        ({"widths": [1, True]}, "x.yaml: key 'widths[1]' should be a whole number, but is true."),
        ({"widths": [1, 4.0]}, "x.yaml: key 'widths[1]' should be a whole number, but is 4.0 (a number)."),
        ({"is_strict": 1}, "x.yaml: key 'is_strict' should be true or false, but is 1 (a whole number)."),
        ({"head": 3}, "x.yaml: key 'head' should be a mapping, but is 3 (a whole number)."),
        ({"depth": None}, "x.yaml: key 'depth' should be a whole number or text, but is null."),
        ({"span": [1]}, "x.yaml: key 'span' should be a list of 2, but is [1] (a list)."),
        ({"span": [1, "2"]}, "x.yaml: key 'span[1]' should be a number, but is '2' (text)."),
        ({"span": [1, 10**400]}, "x.yaml: key 'span[1]' should be a number, but is 1000"),
        ({"verify_ms": {"1": 2.0}}, "key 'verify_ms (the name '1')' should be a whole number, but is '1' (text)."),
        ({"verify_ms": {1: "2"}}, "x.yaml: key 'verify_ms.1' should be a number, but is '2' (text)."),
        ({"notes": []}, "x.yaml: key 'notes' should be a mapping, but is [] (a list)."),
        ({"source": 1}, "x.yaml: key 'source' should be a path, but is 1 (a whole number)."),
        ({"stages": [{"name": "a", "widht": 1, "cost_ms": 1.0}]}, "key 'stages[0].widht' (did you mean 'width'?)"),
        ({"stages": [{"name": "a", "cost_ms": 1.0}]}, "x.yaml: key 'stages[0].width' is missing; add it"),
        ({"stages": [{"name": 1, "width": 1, "cost_ms": 1.0}]}, "key 'stages[0].name' should be text"),
        (
            {"head": {"name": "a", "width": 1, "cost_ms": 1.0, "policy": "tre"}},
            "key 'head.policy' should be 'chain' or 'tree' (did you mean 'tree'?), but is 'tre' (text).",
        ),
    ],
)
def test_each_fault_is_named(change: dict[Any, Any], message: str) -> None:
    mapping = {name: value for name, value in {**good(), **change}.items() if value is not ABSENT}
    with pytest.raises(ArtifactError) as caught:
        parse_dataclass(Plan, mapping, "x.yaml")

    assert message in str(caught.value)


@pytest.mark.parametrize("content", [None, [], "text", 3])
def test_content_that_is_no_mapping(content: object) -> None:
    with pytest.raises(ArtifactError, match=r"x\.yaml: the content should be a mapping, but is "):
        parse_dataclass(Plan, content, "x.yaml")


def test_literals_compare_types() -> None:
    @dataclass
    class Choice:
        value: Literal[1, "a"]

    with pytest.raises(ArtifactError, match="should be 1 or 'a', but is true"):
        parse_dataclass(Choice, {"value": True}, "x.yaml")


def test_a_value_the_class_refuses_is_named() -> None:
    @dataclass
    class Width:
        width: int

        def __post_init__(self) -> None:
            if self.width < 1:
                raise ValueError(f"width must be positive, got {self.width}")

    with pytest.raises(ArtifactError, match=r"x\.yaml: width must be positive, got 0"):
        parse_dataclass(Width, {"width": 0}, "x.yaml")


def test_unsupported_types_are_our_own_fault() -> None:
    @dataclass
    class Odd:
        value: complex

    with pytest.raises(TypeError, match="cannot read the field type"):
        parse_dataclass(Odd, {"value": 1}, "x.yaml")
    with pytest.raises(TypeError, match="needs a dataclass"):
        parse_dataclass(int, {}, "x.yaml")


def test_computed_fields_are_not_read() -> None:
    @dataclass
    class Sum:
        left: int
        total: int = dataclasses.field(init=False, default=0)

    assert parse_dataclass(Sum, {"left": 1}, "x.yaml") == Sum(1)
    with pytest.raises(ArtifactError, match="unknown key 'total'"):
        parse_dataclass(Sum, {"left": 1, "total": 2}, "x.yaml")
