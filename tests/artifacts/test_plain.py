"""Values in plain form: what is written comes back, what has no plain form is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from yggdrasil.artifacts.store import read_yaml, write_yaml

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@examples(50)
@example({"x\x85": "\u2028 a\r\nb\t\ufeff: # ' \" \U0001f333", "empty": [[], {}, ""]})
@example({"words": ["yes", "null", "1e-5", "2026-01-01", "0x1", "~", "=", " a ", "- b", "1_000"]})
@given(st.dictionaries(st.text(min_size=1).map("x{}".format), plain_values, max_size=3))
def test_any_plain_payload_comes_back(tmp_path_factory: pytest.TempPathFactory, payload: dict[str, object]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    write_yaml(path, "plan", 1, payload)

    assert read_yaml(path, "plan", 1) == payload


def test_rich_values_become_plain(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Stage:
        width: int
        path: Path

    path = tmp_path / "x.yaml"
    payload = {"stage": Stage(4, Path("a/b")), "pair": (1, np.float64(0.5)), "count": np.int64(3), "ok": np.bool_(True)}
    write_yaml(path, "plan", 1, payload)

    plain = {"stage": {"width": 4, "path": "a/b"}, "pair": [1, 0.5], "count": 3, "ok": True}
    assert read_yaml(path, "plan", 1) == plain


@pytest.mark.parametrize("value", [object(), {1, 2}, np.arange(3), {(1, 2): 3}, {True: 1}, {0.5: 1}])
def test_values_without_a_plain_form_are_our_own_fault(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match="an artefact"):
        write_yaml(tmp_path / "x.yaml", "plan", 1, {"value": value})
    assert list(tmp_path.iterdir()) == []
