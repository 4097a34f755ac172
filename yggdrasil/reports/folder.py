"""Tables in a folder: those that a calibration left, and those of a report."""

from pathlib import Path

import pandas as pd

from yggdrasil.artifacts import read_csv, write_atomic
from yggdrasil.errors import ArtifactError, YggdrasilError


def optional(path: Path, kind: str, columns: tuple[str, ...], version: int = 1) -> pd.DataFrame:
    """A table, empty where there is no such file; a damaged one is an error."""
    return read_csv(path, kind, version, columns) if path.exists() else pd.DataFrame(columns=list(columns))


def write_tables(tables: dict[str, pd.DataFrame], folder: Path) -> None:
    """Every table as plain CSV; YggdrasilError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            write_atomic(folder / f"{name}.csv", table.to_csv(index=False).encode())
    except (OSError, ArtifactError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise YggdrasilError(f"cannot write the tables to {folder} ({reason}); give another folder") from error
