"""N-gram tables that other processes write while a decoder runs."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from yggdrasil.artifacts.cache import cache_root
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.errors import ArtifactError

NICENESS = 10  # of processes that write tables


def tables_folder() -> Path:
    """Where the user's cache keeps n-gram tables."""
    return cache_root() / "tables"


class WatchedTable:
    """Hands the table in the first of ``files`` that exists to ``use``, and again whenever that file has changed."""

    def __init__(self, files: tuple[Path, ...], use: Callable[[Table], None]) -> None:
        self._files, self._use = files, use
        self._used: tuple[Path, int, int] | None = None

    def look(self) -> bool:
        """Load the table if it has changed; returns whether one is in use. A damaged file is removed."""
        for file in self._files:
            try:
                status = file.stat()
            except OSError:
                continue
            if (version := (file, status.st_mtime_ns, status.st_ino)) == self._used:
                return True
            try:
                table = Table.load(file)
            except ArtifactError:
                file.unlink(missing_ok=True)
                continue
            self._use(table)
            self._used = version
            return True
        return self._used is not None


def start_process(module: str, *arguments: object) -> None:
    """Run a module of this package in a process of its own, which may outlive this one.

    Where none can be started, decoding is as right, and slower.
    """
    with suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
