"""Tables in a folder: those that a calibration left, and those of a report."""

from pathlib import Path

import pandas as pd

from yggdrasil.artifacts import read_csv
from yggdrasil.errors import YggdrasilError


def optional(path: Path, kind: str, columns: tuple[str, ...], version: int = 1) -> pd.DataFrame:
    """A table, empty where there is no such file; a damaged one is an error."""
    return read_csv(path, kind, version, columns) if path.exists() else pd.DataFrame(columns=list(columns))


def write_tables(tables: dict[str, pd.DataFrame], folder: Path) -> None:
    """Every table as plain CSV; YggdrasilError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            table.to_csv(folder / f"{name}.csv", index=False)
    except OSError as error:
        raise YggdrasilError(f"cannot write the tables to {folder} ({error.strerror}); give another folder") from error
