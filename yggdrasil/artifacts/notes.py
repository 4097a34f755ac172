"""Cache values computed from a file, until the file changes."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from yggdrasil.artifacts.atomic import write_atomic
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.plain import parse_json
from yggdrasil.errors import ArtifactError

_known: dict[tuple[str, str], tuple[list[int], Any]] = {}  # (file, name) -> file's state and value, for this process


def cached_for_file(path: Path, name: str, make: Callable[[], Any]) -> Any:
    """Return the JSON value that ``make()`` computes from the file ``path``, or its copy cached on disk.

    A cached value is used only while the file's size, times, inode and device are the same. If the cache cannot be
    written, ``make`` is called once in every process.

    Args:
        name: identifies the value in the cache. Change it when the code of ``make`` changes.

    Raises:
        OSError: there is no file ``path``.
    """
    path = path.resolve()  # a link and its file share a note
    stat = path.stat()
    state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
    key = str(path), name
    if key in _known and _known[key][0] == state:
        return _known[key][1]
    file = cache_root() / "notes" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = parse_json(file.read_bytes())
        if note["state"] == state:
            _known[key] = state, note["value"]
            return note["value"]
    value = make()
    _known[key] = state, value
    with suppress(ArtifactError):
        write_atomic(file, json.dumps({"state": state, "value": value}).encode())
    return value
