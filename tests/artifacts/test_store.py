"""YAML, CSV and safetensors artefacts: round trips, and each file that is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import safetensors.numpy
import yaml

from yggdrasil.artifacts.store import (
    _exact_floats,
    read_csv,
    read_tensors,
    read_yaml,
    write_csv,
    write_tensors,
    write_yaml,
)
from yggdrasil.errors import ArtifactError

PAYLOAD = {"name": "demo", "widths": [1, 4, 16], "verify_ms": {1: 0.1, 4: 1e-05}, "stages": [{"a": None, "b": True}]}
KINDS = ("yaml", "csv", "tensors")


@pytest.fixture(params=KINDS)
def artifact(request: pytest.FixtureRequest, tmp_path: Path) -> "Artifact":
    return Artifact(request.param, tmp_path / "artefact")


@dataclasses.dataclass
class Artifact:
    """One file of any of the three formats, behind one face."""

    form: str
    path: Path

    def write(self, kind: str = "plan", version: int = 2) -> None:
        if self.form == "yaml":
            write_yaml(self.path, kind, version, PAYLOAD)
        elif self.form == "csv":
            write_csv(self.path, kind, version, pd.DataFrame({"width": [1, 4], "ms": [0.1, 0.2]}))
        else:
            write_tensors(self.path, kind, version, {"weight": np.arange(4.0)})

    def read(self) -> object:
        read: dict[str, Any] = {"yaml": read_yaml, "csv": read_csv, "tensors": read_tensors}
        return read[self.form](self.path, "plan", 2)

    def fault(self) -> str:
        with pytest.raises(ArtifactError) as caught:
            self.read()
        message = str(caught.value)
        assert str(self.path) in message
        assert message.endswith(".")
        return message


def test_missing_file(artifact: Artifact) -> None:
    assert "there is no file" in artifact.fault()


def test_folder_in_place_of_a_file(artifact: Artifact) -> None:
    artifact.path.mkdir()

    assert "cannot read" in artifact.fault()


@pytest.mark.parametrize(
    ("kind", "version", "said"),
    [
        ("profile", 2, "is of kind 'profile', not 'plan'"),
        ("plan", 3, "newer Yggdrasil (schema 3, this one reads 2); upgrade Yggdrasil or run"),
        ("plan", 1, "older Yggdrasil (schema 1, this one reads 2); run `yggdrasil calibrate` again"),
    ],
)
def test_other_kinds_and_schemas(artifact: Artifact, kind: str, version: int, said: str) -> None:
    artifact.write(kind, version)

    assert said in artifact.fault()


def test_every_truncation_is_refused(artifact: Artifact) -> None:
    artifact.write()
    data = artifact.path.read_bytes()
    for length in range(len(data) - 1):  # the last byte may be a line end
        artifact.path.write_bytes(data[:length])
        assert "`yggdrasil calibrate` again" in artifact.fault()


def test_writing_leaves_no_other_file(artifact: Artifact) -> None:
    artifact.write()
    artifact.write()

    assert [entry.name for entry in artifact.path.parent.iterdir()] == ["artefact"]


def test_binary_noise(artifact: Artifact) -> None:
    artifact.path.write_bytes(bytes(range(256)))

    assert "truncated" in artifact.fault() or "is not a whole safetensors file" in artifact.fault()


# --- YAML ---


def test_yaml_round_trip_and_layout(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    write_yaml(path, "plan", 1, PAYLOAD)

    assert read_yaml(path, "plan", 1) == PAYLOAD
    lines = path.read_text().splitlines()
    assert lines[:2] == ["kind: plan", "schema_version: 1"]
    assert "widths: [1, 4, 16]" in lines
    assert "  4: 1.0e-05" in lines


def test_reserved_keys_are_our_own_fault(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reserved keys \['kind'\]"):
        write_yaml(tmp_path / "x.yaml", "plan", 1, {"kind": "other"})


@pytest.mark.parametrize(
    ("old", "new"), [("demo", "demO"), ("[1, 4, 16]", "[1, 4]"), ("4: 1.0", "'4': 1.0"), ("b: true", "b: true\nc: 1")]
)
def test_edited_yaml_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "x.yaml"
    write_yaml(path, "plan", 1, PAYLOAD)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))

    message = r"x\.yaml was edited or truncated: its checksum does not match; restore it or run `yggdrasil calibrate`"
    with pytest.raises(ArtifactError, match=message):
        read_yaml(path, "plan", 1)


def test_comments_and_order_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    write_yaml(path, "plan", 1, PAYLOAD)
    content = yaml.safe_load(path.read_text())
    path.write_text("# mine\n" + yaml.safe_dump(content, sort_keys=True))

    assert read_yaml(path, "plan", 1) == PAYLOAD


# What PyYAML answers with faults that are none of its own; the last stands for itself.
UNREADABLE = ("[" * 100_000, "a: !!timestamp x", "a: !!bool x", "a: !!int ''", "a: &a [*a]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "is not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("when: 2026-99-99", "is not valid YAML"),
        *((text, "is not valid YAML") for text in UNREADABLE),
        ("", "is not a Yggdrasil file of kind 'plan' or was truncated"),
        ("- 1", "is not a Yggdrasil file of kind 'plan' or was truncated"),
        ("a: 1", "is not a Yggdrasil file of kind 'plan' or was truncated"),
        ("kind: plan\nschema_version: '1'\nchecksum: x", "is not a Yggdrasil file of kind 'plan'"),
    ],
)
def test_files_that_are_not_ours(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)

    with pytest.raises(ArtifactError, match=message):
        read_yaml(path, "plan", 1)


# --- CSV ---


@pytest.mark.parametrize(
    ("version", "is_asked"), [("2.3.3", True), ("3.0.0", True), ("3.1.1", False), ("4.0.0rc1", False)]
)
def test_exact_floats_on_each_pandas(version: str, is_asked: bool) -> None:
    assert ("float_precision" in _exact_floats(version)) is is_asked


def frame() -> pd.DataFrame:
    columns = {
        "width": [1, 4, 16],
        "ms": [0.1 + 0.2, 1e-300, float("nan")],
        "backend": ["None", "NA", 'a,b\n"c"'],
        "is_warm": [True, False, True],
    }
    return pd.DataFrame(columns)


def test_csv_round_trip_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write_csv(path, "latency", 1, frame())

    pd.testing.assert_frame_equal(read_csv(path, "latency", 1, columns=["width", "ms"]), frame(), check_exact=True)


def test_csv_without_rows_or_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write_csv(path, "latency", 1, frame().head(0))
    assert list(read_csv(path, "latency", 1).columns) == list(frame().columns)

    write_csv(path, "latency", 1, pd.DataFrame())
    assert read_csv(path, "latency", 1).empty


def test_csv_missing_column(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write_csv(path, "latency", 1, frame())

    with pytest.raises(ArtifactError, match=r"x\.csv lacks the column 'widths' \(did you mean 'width'\?\)"):
        read_csv(path, "latency", 1, columns=["ms", "widths"])


def test_csv_survives_rewritten_line_ends_and_no_other_edit(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write_csv(path, "latency", 1, frame())
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert list(read_csv(path, "latency", 1)["width"]) == [1, 4, 16]
    path.write_text(path.read_text().replace("16,", "17,"))

    with pytest.raises(ArtifactError, match="was edited or truncated: its checksum does not match"):
        read_csv(path, "latency", 1)


# --- safetensors ---


def test_tensors_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "weight": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
        "steps": np.array([1, 2], dtype=np.int64),
        "scale": np.array(0.5),
        "empty": np.zeros((0, 3), dtype=np.float32),
    }
    write_tensors(path, "predictor", 1, tensors)

    loaded = read_tensors(path, "predictor", 1)
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_tensors_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "x.safetensors"
    write_tensors(path, "predictor", 1, {"weight": torch.ones(2, 2, requires_grad=True)})
    np.testing.assert_array_equal(read_tensors(path, "predictor", 1)["weight"], np.ones((2, 2)))

    with pytest.raises(TypeError):
        write_tensors(path, "predictor", 1, {"weight": torch.ones(2, dtype=torch.bfloat16)})


def test_tensors_edited_or_of_another_writer(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, "predictor", 1, {"weight": np.zeros(8)})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="was edited or truncated: its checksum does not match"):
        read_tensors(path, "predictor", 1)
    safetensors.numpy.save_file({"weight": np.zeros(8)}, path)
    with pytest.raises(ArtifactError, match="is not a Yggdrasil file of kind 'predictor'"):
        read_tensors(path, "predictor", 1)


def test_text_among_the_numbers_of_a_table_is_named(tmp_path: Path) -> None:
    """Whatever the checksum says; what is meant to be text, or is asked for by nobody, may be."""
    path = tmp_path / "x.csv"
    table = {"stage": ["verify", "plain"], "ms": [0.5, "x"], "note": ["a", None], "context": [None, None]}
    write_csv(path, "samples", 1, pd.DataFrame(table))

    with pytest.raises(ArtifactError, match=r"x\.csv holds no numbers in the column 'ms'; restore it or run"):
        read_csv(path, "samples", 1, ("stage", "ms"))
    assert len(read_csv(path, "samples", 1, ("stage", "context"))) == 2
    write_csv(path, "samples", 1, pd.DataFrame(columns=["stage", "ms"]))
    assert read_csv(path, "samples", 1, ("stage", "ms")).empty
