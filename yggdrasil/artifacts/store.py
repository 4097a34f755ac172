"""Read and write artefacts: YAML, CSV and safetensors files with a kind, a schema version and a checksum.

Writing is atomic. Reading raises ArtifactError for files that are missing, damaged, or of another kind or schema
version. No pickle is used.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from yggdrasil.artifacts.atomic import shown, write_atomic
from yggdrasil.artifacts.parsing import close_match
from yggdrasil.artifacts.plain import parse_json, parse_yaml, to_plain, yaml_text
from yggdrasil.errors import ArtifactError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

_HEADER_KEYS = ("kind", "schema_version", "checksum")
_CSV_HEADER = re.compile(
    r"# yggdrasil kind=(?P<kind>\S+) schema_version=(?P<schema_version>\d+) checksum=(?P<checksum>\S+)"
)
# Columns with text; all other requested columns must be numeric.
_TEXT_COLUMNS = frozenset(
    ("backend", "bonus", "model", "plan", "reads", "role", "schedule", "scorer", "shape", "stage", "step",
     "text", "variant")
)  # fmt: skip
_MAKE_AGAIN = "run `yggdrasil calibrate` again"


# --- YAML ---------------------------------------------------------------------------------------------------------


def write_yaml(path: Path, kind: str, version: int, payload: Mapping[str, object]) -> None:
    """Write ``payload`` atomically as YAML, after a header with kind, schema version and checksum.

    ``to_plain`` converts the values; floats are written exactly. The checksum is independent of comments and the
    order of keys.

    Args:
        kind: kind of the file, such as "plan"; a reader checks it.
        version: version of the file's format.

    Raises:
        ArtifactError: the file cannot be written.
        TypeError: a value has no plain form.
        ValueError: ``payload`` has a key of the header (kind, schema_version, checksum).
    """
    plain = to_plain(payload)
    assert isinstance(plain, dict), f"{type(plain) = }"
    taken = [key for key in _HEADER_KEYS if key in plain]
    if taken:
        raise ValueError(f"the payload of {shown(path)} uses the reserved keys {taken}")
    content = {"kind": kind, "schema_version": version, "checksum": _checksum(plain), **plain}
    write_atomic(path, yaml_text(content).encode())


def read_yaml(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Read a YAML file with a checksum and return its content without the header.

    Args:
        kind: the expected kind, such as "plan".
        version: the expected version of the file's format.

    Raises:
        ArtifactError: the file is missing, not YAML, of another kind or version, edited or truncated.
    """
    try:
        content = parse_yaml(_read_bytes(path))
    except ValueError as error:
        raise ArtifactError(
            f"{shown(path)} is not valid YAML or was truncated; restore it or {_MAKE_AGAIN}."
        ) from error
    if not isinstance(content, dict):
        raise _not_ours(path, kind)
    header = {key: content.pop(key, None) for key in _HEADER_KEYS}
    _check_header(path, header, kind, version)
    if _checksum(content) != header["checksum"]:
        _refuse_damaged(path)
    return content


def _checksum(payload: object) -> str:
    text = json.dumps(_canonical(payload), sort_keys=True, separators=(",", ":"), default=repr)
    return _digest(text.encode())


def _canonical(value: object) -> object:
    """Prefix keys with their type, so that ``{1: x}`` and ``{"1": x}`` have different checksums."""
    if isinstance(value, dict):
        return {f"{type(key).__name__}:{key}": _canonical(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_canonical(entry) for entry in value]
    return value


# --- CSV ----------------------------------------------------------------------------------------------------------


def write_csv(path: Path, kind: str, version: int, frame: "pd.DataFrame") -> None:
    """Write the columns of ``frame`` atomically as CSV, after a comment line with kind, version and checksum.

    Floats are written exactly. ``read_csv`` returns an empty text as NaN.

    Raises:
        ArtifactError: the file cannot be written.
    """
    body = frame.to_csv(index=False, lineterminator="\n").encode()
    head = f"# yggdrasil kind={kind} schema_version={version} checksum={_digest(body)}\n"
    write_atomic(path, head.encode() + body)


def read_csv(path: Path, kind: str, version: int, columns: Sequence[str] = ()) -> "pd.DataFrame":
    """Read a CSV file with a checksum as a DataFrame.

    Args:
        kind: the expected kind, such as "stage-samples".
        version: the expected version of the file's format.
        columns: columns that must exist, and must be numeric except for ``_TEXT_COLUMNS``. Other columns are returned
            too.

    Raises:
        ArtifactError: the file is missing, of another kind or version, edited or truncated, lacks a column, or has text
            in a numeric column.
    """
    import io

    import pandas as pd

    # Git may have converted line ends.
    head, _, body = _read_bytes(path).replace(b"\r\n", b"\n").partition(b"\n")
    match = _CSV_HEADER.fullmatch(head.decode(errors="replace"))
    if match is None:
        raise _not_ours(path, kind)
    _check_header(path, {**match.groupdict(), "schema_version": int(match["schema_version"])}, kind, version)
    if _digest(body) != match["checksum"]:
        _refuse_damaged(path)
    try:
        frame: pd.DataFrame = pd.read_csv(
            io.BytesIO(body), keep_default_na=False, na_values=[""], **_exact_floats(pd.__version__)
        )
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame()
    present = [str(column) for column in frame.columns]
    for column in columns:
        if column not in present:
            hint = close_match(column, present)
            raise ArtifactError(f"{shown(path)} lacks the column '{column}'{hint}; {_MAKE_AGAIN}.")
        values = frame[column]
        if column not in _TEXT_COLUMNS and not (values.empty or pd.api.types.is_numeric_dtype(values)):
            raise ArtifactError(
                f"{shown(path)} holds no numbers in the column '{column}'; restore it or {_MAKE_AGAIN}."
            )
    return frame


def _exact_floats(pandas_version: str) -> dict[str, Any]:
    """Return the option with which pandas reads floats exactly; pandas 3.1 and later do so by default."""
    major, minor = pandas_version.split(".")[:2]
    return {} if (int(major), int(minor)) >= (3, 1) else {"float_precision": "round_trip"}


# --- safetensors --------------------------------------------------------------------------------------------------


def write_tensors(path: Path, kind: str, version: int, tensors: Mapping[str, Any]) -> None:
    """Write NumPy arrays or torch tensors atomically as safetensors, with kind, version and checksum.

    Raises:
        ArtifactError: the file cannot be written.
        TypeError: a tensor has a dtype that NumPy lacks, such as bfloat16.
    """
    import safetensors.numpy

    arrays = {name: _as_array(value) for name, value in tensors.items()}
    header = {"kind": kind, "schema_version": str(version), "checksum": _tensor_checksum(arrays)}
    write_atomic(path, safetensors.numpy.save(arrays, metadata=header))


def read_tensors(path: Path, kind: str, version: int) -> "dict[str, np.ndarray[Any, Any]]":
    """Read a safetensors file with a checksum and return its arrays by name.

    Args:
        kind: the expected kind, such as "predictor".
        version: the expected version of the file's format.

    Raises:
        ArtifactError: the file is missing, not safetensors, of another kind or version, edited or truncated.
    """
    import safetensors
    import safetensors.numpy

    data = _read_bytes(path)
    try:
        arrays = safetensors.numpy.load(data)
        metadata = _tensor_metadata(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ArtifactError(f"{shown(path)} is not a whole safetensors file; restore it or {_MAKE_AGAIN}.") from error
    version_text = metadata.get("schema_version", "")
    found_version = int(version_text) if version_text.isdecimal() else None
    _check_header(path, {**metadata, "schema_version": found_version}, kind, version)
    if _tensor_checksum(arrays) != metadata.get("checksum"):
        _refuse_damaged(path)
    return arrays


def _as_array(value: Any) -> "np.ndarray[Any, Any]":
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value, order="C")  # safetensors writes the buffer without regard to strides


def _tensor_metadata(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] = parse_json(data[8 : 8 + length]).get("__metadata__", {})
    return metadata


def _tensor_checksum(arrays: "Mapping[str, np.ndarray[Any, Any]]") -> str:
    hasher = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        hasher.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        hasher.update(array.tobytes())
    return f"sha256:{hasher.hexdigest()[:16]}"


# --- common to all formats ----------------------------------------------------------------------------------------


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()[:16]}"


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ArtifactError(f"there is no file {shown(path)}; check the path or {_MAKE_AGAIN}.") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArtifactError(f"cannot read {shown(path)} ({reason}); check its path and permissions.") from error


def _check_header(path: Path, header: Mapping[str, object], kind: str, version: int) -> None:
    """Raise ArtifactError if the header is incomplete, or its kind or schema version is not the expected one."""
    found_kind, found_version = header.get("kind"), header.get("schema_version")
    if not isinstance(found_kind, str) or type(found_version) is not int or not header.get("checksum"):
        raise _not_ours(path, kind)
    if found_kind != kind:
        raise ArtifactError(f"{shown(path)} is of kind '{found_kind}', not '{kind}'; give a file of kind '{kind}'.")
    if found_version > version:
        raise ArtifactError(
            f"{shown(path)} was written by a newer Yggdrasil (schema {found_version}, this one reads {version}); "
            f"upgrade Yggdrasil or {_MAKE_AGAIN}."
        )
    if found_version < version:
        raise ArtifactError(
            f"{shown(path)} was written by an older Yggdrasil (schema {found_version}, this one reads {version}); "
            f"{_MAKE_AGAIN}."
        )


def _not_ours(path: Path, kind: str) -> ArtifactError:
    return ArtifactError(
        f"{shown(path)} is not a Yggdrasil file of kind '{kind}' or was truncated: its header (kind, "
        f"schema_version, checksum) is not whole; restore it or {_MAKE_AGAIN}."
    )


def _refuse_damaged(path: Path) -> NoReturn:
    raise ArtifactError(
        f"{shown(path)} was edited or truncated: its checksum does not match; restore it or {_MAKE_AGAIN}."
    )
