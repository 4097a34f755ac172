"""Temporary files and folders that end with their process, however it ends.

Each is locked while it is in use. The system releases the lock of a process that was killed, so whoever comes by next
can tell what is left over from what another process still writes, and removes it.
"""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SUFFIX = ".tmp"
_NEWBORN_SECONDS = 1.0  # between its making and its lock


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in ``parent``, gone with all it holds when the block ends; leftovers of others go first.

    Raises:
        OSError: it cannot be made.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    folder = Path(tempfile.mkdtemp(prefix=".", suffix=SUFFIX, dir=parent))
    with in_use(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Keep others from taking the file or folder ``path`` for a leftover while the block runs."""
    descriptor = _try_lock(path)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what processes that are gone left in ``folder``: temporary files and folders, or those for ``name`` alone.

    What cannot be removed stays: it harms nobody.
    """
    pattern = re.compile(r"\..+\.tmp") if name is None else beside(name, SUFFIX)
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if pattern.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _NEWBORN_SECONDS:
                _remove_if_left(path)


def beside(name: str, suffix: str) -> re.Pattern[str]:
    """The names that something called ``name`` has while it is written, or moved aside."""
    return re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}{re.escape(suffix)}")


@cache
def remove_leftovers_once(folder: Path) -> None:
    """The same, the first time that this process asks: at every start."""
    remove_leftovers(folder)


def _remove_if_left(path: Path) -> None:
    descriptor = _try_lock(path)
    if descriptor is None:
        return
    try:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock of ``path``; None where another process does, or none can be had."""
    try:
        import fcntl
    except ImportError:  # Windows: nothing is ever taken for a leftover
        return None
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor
