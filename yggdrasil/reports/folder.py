"""Reads the CSV tables of a calibration and writes those of a report."""

from pathlib import Path

import pandas as pd

from yggdrasil.artifacts import read_csv, write_atomic
from yggdrasil.errors import ArtifactError, YggdrasilError


def read_csv_if_any(path: Path, kind: str, columns: tuple[str, ...], version: int = 1) -> pd.DataFrame:
    """Read a CSV table with a checksum; an empty table with ``columns`` if the file is missing.

    Args:
        kind: the expected kind of the file, such as "stage-samples".
        columns: names of columns that the file must have.
        version: the expected version of its format.

    Raises:
        ArtifactError: the file is damaged, of another kind or version, or lacks one of ``columns``.
    """
    return read_csv(path, kind, version, columns) if path.exists() else pd.DataFrame(columns=list(columns))


def write_tables(tables: dict[str, pd.DataFrame], folder: Path) -> None:
    """Write each table as ``NAME.csv`` in ``folder``, which is made if necessary; existing files are replaced.

    Raises:
        YggdrasilError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            write_atomic(folder / f"{name}.csv", table.to_csv(index=False).encode())
    except (OSError, ArtifactError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise YggdrasilError(f"cannot write the tables to {folder} ({reason}); give another folder") from error
