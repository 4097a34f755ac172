"""Files of n-gram tables that other processes write while a decoder runs."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.memory import trim_heap
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.errors import ArtifactError

SCORER_FILE, TABLE_FILE = "scorer.safetensors", "table.safetensors"
NICENESS = 10  # niceness of processes that write tables


def tables_folder() -> Path:
    """Return the folder of n-gram tables, ``tables`` in the folder of cached files. It may not exist."""
    return cache_root() / "tables"


class WatchedTable:
    """Watcher of n-gram table files, which passes the table of the first existing file to ``use`` whenever it is new.

    ``used`` is the file whose table is in use already, if any.
    """

    def __init__(self, files: tuple[Path, ...], use: Callable[[Table], None], used: Path | None = None) -> None:
        self._files, self._use = files, use
        self._used = None if used is None else _version(used)
        self._has_looked = False

    def load_once(self) -> None:
        """Call ``load_newest``, unless ``load_newest`` or ``load_once`` has been called before."""
        if not self._has_looked:
            self.load_newest()

    def load_newest(self) -> bool:
        """Pass the table of the first existing file to ``use`` if that file is new; return whether a table is in use.

        A damaged file is deleted, and the next file is tried.
        """
        self._has_looked = True
        for file in self._files:
            if (version := _version(file)) is None:
                continue
            if version == self._used:
                return True
            try:
                table = Table.load(file)
            except ArtifactError:
                file.unlink(missing_ok=True)
                continue
            self._use(table)
            self._used = version
            del table  # its arrays take as much memory as what drafting keeps of them
            trim_heap()
            return True
        return self._used is not None


def _version(file: Path) -> tuple[Path, int, int] | None:
    """Return path, modification time and inode of ``file``, to detect changes; None if there is no such file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return file, status.st_mtime_ns, status.st_ino


def start_process(module: str, *arguments: object) -> None:
    """Start ``python -m MODULE ARGUMENTS`` without output in a new session, so that it may outlive this process.

    If no process can be started, nothing happens: decoding is still correct but slower.
    """
    with suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
