"""The folders in which PyTorch unpacks packages: whether they can be, and that nothing stays there.

Its loader removes what it has unpacked when it is let go, which nobody does where a process is killed, nor for units,
which last as long as the process.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from yggdrasil.errors import first_line

_MAPPED = Path("/proc/self/maps")
_FOLDER = "aotinductor_"  # what PyTorch calls each of them, and six letters


def unpacked_in() -> Path:
    """Where packages are unpacked: PyTorch's own rule, which is not that of ``tempfile``."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    return Path(next((folder for folder in named if folder is not None), "/tmp") or "/")


def why_not_unpacked(package: Path, folder: Path) -> str | None:
    """Why ``folder`` does not take what the package holds, or lets no code run; None where it does both."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(package.read_bytes())
            file.flush()
        if sys.platform != "win32" and os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return "mounted noexec"
    except OSError as error:
        return error.strerror or first_line(error)
    return None


@contextmanager
def nothing_stays() -> Iterator[None]:
    """Of a package that is loaded in this block: code that is mapped needs no file. Where Linux says what is."""
    before = _mapped()
    yield
    for folder in _mapped() - before:
        shutil.rmtree(folder, ignore_errors=True)


def _mapped() -> set[Path]:
    """Folders of unpacked packages whose code this process has."""
    try:
        lines = os.fsdecode(_MAPPED.read_bytes()).splitlines()
    except OSError:
        return set()
    files = [Path(line.split(maxsplit=5)[5]) for line in lines if f"/{_FOLDER}" in line]
    return {folder for file in files for folder in file.parents if folder.name.startswith(_FOLDER)}
