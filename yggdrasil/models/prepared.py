"""Folders of the user's cache that are made once of a model, and made again where they are damaged or out of date."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from yggdrasil.artifacts import atomic_directory
from yggdrasil.artifacts.cache import cache_root

MARKER = "prepared.json"
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 2**16


def prepared_root() -> Path:
    """Where they lie, by the fingerprint of the model."""
    return cache_root() / "models"


def is_whole(folder: Path, layout: int | str) -> bool:
    """Whether the folder was prepared to the end in this layout, and has not changed since."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return bool(marker == {"layout": layout, "digest": _digest(folder)})
    except (OSError, ValueError):
        return False


def prepare(folder: Path, layout: int | str, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill the folder, which takes its place when all is there."""
    with atomic_directory(folder) as partial:
        write(partial)
        (partial / MARKER).write_text(json.dumps({"layout": layout, "digest": _digest(partial)}))


def _digest(folder: Path) -> str:
    """Of every file's size and of its first, last and some other parts: what is cut off or overwritten is noticed."""
    hasher = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name != MARKER:
            size = file.stat().st_size
            hasher.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as stream:
                for start in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
                    stream.seek(min(start, max(size - _SAMPLE_BYTES, 0)))
                    hasher.update(stream.read(_SAMPLE_BYTES))
    return hasher.hexdigest()
