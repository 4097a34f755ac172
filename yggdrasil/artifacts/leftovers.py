"""Temporary files and folders that are removed even if their process is killed.

A temporary file or folder is locked while it is in use. The system releases the locks of a killed process, so that a
later process can tell the leftovers from files that are still being written, and removes the leftovers.
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
_NEWBORN_SECONDS = 1.0  # minimum age of leftovers: a new file is not locked yet


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in ``parent``, which is created if it is missing; remove it when the block ends.

    Temporary folders that killed processes left in ``parent`` are removed first.

    Raises:
        OSError: the folder cannot be created.
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
    """Hold an exclusive lock on the file or folder ``path`` while the block runs, so that no process removes it.

    ``remove_leftovers`` of any process takes an unlocked temporary file for the leftover of a killed process. If the
    path is missing or already locked, the block runs without a lock.
    """
    descriptor = _try_lock(path)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files and folders that killed processes have left in ``folder``.

    Files younger than 1 s stay, since a new file is not locked yet. Failures are ignored.

    Args:
        name: remove only temporaries of the file or folder of this name; None: remove all.
    """
    pattern = re.compile(r"\..+\.tmp") if name is None else temporary_name_pattern(name, SUFFIX)
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if pattern.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _NEWBORN_SECONDS:
                _remove_if_left(path)


def temporary_name_pattern(name: str, suffix: str) -> re.Pattern[str]:
    """Return a regular expression of temporary names of the file or folder ``name``: ``.NAME.HEX`` + ``suffix``."""
    return re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}{re.escape(suffix)}")


@cache
def remove_leftovers_once(folder: Path) -> None:
    """Call ``remove_leftovers(folder)``, but only once per process and folder."""
    remove_leftovers(folder)


def _remove_if_left(path: Path) -> None:
    """Remove ``path`` unless another process holds its lock."""
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
    """Return a file descriptor that holds the lock of ``path``, or None if it cannot be locked."""
    try:
        import fcntl
    except ImportError:  # Windows: leftovers are never removed
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
