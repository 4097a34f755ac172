"""Folders in the user's cache that are derived from a model once, and rebuilt if damaged or out of date."""

import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path

from yggdrasil.artifacts import atomic_directory, parse_json, shown
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.lock import locked, tell

MARKER = "prepared.json"
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 2**16
_HEAD_BYTES = 2**20  # the beginning of a large file, with its metadata, which is hashed completely
_SMALL_BYTES = _NUM_SAMPLES * _SAMPLE_BYTES


def prepared_root() -> Path:
    """Return the folder in the user's cache with all folders derived from models, grouped by model fingerprint."""
    return cache_root() / "models"


def is_whole(folder: Path, layout: int | str, sampled: str | None = None) -> bool:
    """Return whether a prepared folder is complete, has this version of the layout, and is unchanged.

    Args:
        layout: the version that the reader knows.
        sampled: name of a large file of which only samples are hashed, so that its reader must check the rest; None:
            all files are hashed whole.
    """
    try:
        marker = parse_json((folder / MARKER).read_text())
        return bool(marker == {"layout": layout, "digest": _digest(folder, sampled)})
    except (OSError, ValueError):
        return False


def prepare(folder: Path, layout: int | str, write: Callable[[Path], None], sampled: str | None = None) -> None:
    """Call ``write`` on a temporary folder, which then replaces ``folder`` atomically.

    A complete ``folder`` is replaced, too: call ``is_whole`` first. A lock admits one process at a time. If another
    process completed the folder while this one waited for the lock, ``write`` is not called.

    Args:
        layout: version to record in the folder.
        write: writes the files into the temporary folder, its argument.
        sampled: name of a large file of which only samples are hashed; None: all files are hashed whole.

    Raises:
        ArtifactError: the folder or its lock cannot be written.
    """
    before = _made(folder)
    with locked(folder.with_name(f"{folder.name}.lock"), f"preparing {shown(folder)}", wait=tell):
        if _made(folder) != before and is_whole(folder, layout, sampled):
            return
        with atomic_directory(folder) as partial:
            write(partial)
            (partial / MARKER).write_text(json.dumps({"layout": layout, "digest": _digest(partial, sampled)}))


def _made(folder: Path) -> tuple[int, int] | None:
    """Return inode and modification time of the marker, which differ between two builds; None if there is none."""
    try:
        stat = (folder / MARKER).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _digest(folder: Path, sampled: str | None) -> str:
    """Return a hash of every file's name, size and content; of ``sampled``, of the first 1 MiB and 64 samples."""
    hasher = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name != MARKER:
            size = file.stat().st_size
            hasher.update(f"{file.name} {size}\n".encode())
            if size > _SMALL_BYTES and file.name != sampled:
                hasher.update(str(_checksum(file)).encode())
                continue
            with file.open("rb") as stream:
                hasher.update(stream.read(_HEAD_BYTES))
                for start in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
                    stream.seek(min(start, max(size - _SAMPLE_BYTES, 0)))
                    hasher.update(stream.read(_SAMPLE_BYTES))
    return hasher.hexdigest()


def _checksum(file: Path) -> int:
    """Return the CRC-32 of a large file, three times as fast as a cryptographic hash."""
    checksum = 0
    with file.open("rb") as stream:
        while part := stream.read(_SMALL_BYTES):
            checksum = zlib.crc32(part, checksum)
    return checksum
