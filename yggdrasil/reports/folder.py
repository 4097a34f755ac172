"""Reads the CSV tables of a calibration and writes those of a report."""

from pathlib import Path

import pandas as pd

from yggdrasil.artifacts import read_csv, write_atomic
from yggdrasil.errors import ArtifactError, YggdrasilError


def optional(path: Path, kind: str, columns: tuple[str, ...], version: int = 1) -> pd.DataFrame:
    """Load a CSV table of ``kind``; an empty table if the file is missing. Raises ArtifactError if it is damaged."""
    return read_csv(path, kind, version, columns) if path.exists() else pd.DataFrame(columns=list(columns))


def write_tables(tables: dict[str, pd.DataFrame], folder: Path) -> None:
    """Write each table as ``NAME.csv`` in ``folder``. Raises YggdrasilError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            write_atomic(folder / f"{name}.csv", table.to_csv(index=False).encode())
    except (OSError, ArtifactError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise YggdrasilError(f"cannot write the tables to {folder} ({reason}); give another folder") from error
