"""The folder of unfinished work, from which an interrupted calibration resumes."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from yggdrasil.artifacts import current_machine, profile_directory, shown, write_atomic
from yggdrasil.artifacts.atomic import resolve_link
from yggdrasil.calibration.calibration_settings import CalibrationSettings
from yggdrasil.errors import ArtifactError, YggdrasilError, first_line

T = TypeVar("T")


def open_work(settings: CalibrationSettings) -> Path:
    """Create the folder of a calibration's intermediate results if it is missing, and return its path.

    An existing folder is kept if its file settings.json holds the same settings; otherwise its contents are deleted.

    Raises:
        ArtifactError or OSError: the folder cannot be emptied or written.
    """
    folder = profile_directory(settings.root, settings.name, current_machine())
    work = resolve_link(folder.with_name(folder.name + ".partial"))
    identity = json.dumps(settings.identity(), sort_keys=True, default=str)
    marker = work / "settings.json"
    if read_or_drop(marker, lambda path: path.read_text() == identity) is not True:
        if work.is_dir():
            shutil.rmtree(work)
        work.unlink(missing_ok=True)
        work.mkdir(parents=True)
        write_atomic(marker, identity.encode())
    return work


def open_part(work: Path, name: str, shared: Iterable[str]) -> Path:
    """Create the subfolder ``name`` of ``work`` if it is missing, and return it.

    Args:
        shared: names of files to copy from ``work``, if they exist there and the subfolder lacks them.
    """
    part = work / name
    part.mkdir(exist_ok=True)
    for file in shared:
        if (work / file).exists() and not (part / file).exists():
            shutil.copyfile(work / file, part / file)
    return part


def read_or_drop(file: Path, read: Callable[[Path], T]) -> T | None:
    """Return ``read(file)``, or None if the file is missing or damaged. A damaged file is deleted.

    Args:
        file: the path to read; a folder at this path counts as damaged.
        read: raises ArtifactError, ValueError or SafetensorError if the file is damaged.

    Raises:
        YggdrasilError: the file cannot be read because of an OSError; it is not deleted.
    """
    try:
        return read(file) if file.exists() else None
    except (ArtifactError, OSError, ValueError, SafetensorError) as error:
        cause = error.__cause__ if isinstance(error, ArtifactError) else error
        if isinstance(cause, OSError) and not file.is_dir():
            raise YggdrasilError(
                f"{shown(file)} cannot be read ({_reason(file, cause)}) and is left as it is; run again when it can be"
            ) from error
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
        return None


def _reason(file: Path, error: OSError) -> str:
    """Return why ``file`` cannot be read; safetensors reports any file that it cannot open as missing."""
    try:
        file.open("rb").close()
    except OSError as own:
        error = own
    return error.strerror or first_line(error)
