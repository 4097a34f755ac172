"""Files and folders that appear whole or not at all."""

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from yggdrasil.artifacts.leftovers import SUFFIX, beside, in_use, remove_leftovers
from yggdrasil.errors import ArtifactError

_ASIDE = ".old"


def shown(path: Path) -> str:
    """Return the path as a person would type it: relative to the working directory where it lies inside."""
    absolute = path.absolute()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


def cannot_write(path: Path, error: OSError) -> ArtifactError:
    """That ``path`` cannot be written, whatever of it ``error`` tells of."""
    reason = error.strerror or str(error)
    return ArtifactError(f"cannot write {shown(path)} ({reason}); check the folder's permissions and free space.")


def followed(path: Path) -> Path:
    """What a symbolic link points at in the end; the path as it is where it is none, or one to itself."""
    try:
        return path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError):  # as older Pythons call it
        return path


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` under a temporary name beside ``path``, flush it to disk, then take the place of ``path``.

    Missing parent folders are made. A reader sees the old content or the new, never a part. A device or a pipe is
    written to and stays what it is; of a symbolic link, what it points at is replaced.

    Raises:
        ArtifactError: The file cannot be written; what was there before is untouched.
    """
    place = followed(path)
    temporary = _temporary_sibling(place)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(place.parent, place.name)
        with temporary.open("xb") as file, in_use(temporary):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(place)
        _fsync_directory(place.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(path: Path, *, is_folder: bool = False) -> None:
    """See that ``path`` can be written later, without writing it: as a file, or as a folder of files.

    Raises:
        ArtifactError: a folder stands where a file belongs or the reverse, or no file can be made there.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # which tells of a link to itself, as exists() does not
        if path.exists() and path.is_dir() != is_folder:
            found, wanted = ("file", "folder") if is_folder else ("folder", "file")
            raise ArtifactError(f"{shown(path)} is a {found}, not a {wanted}; name another.")
        if path.exists() and not is_folder and not path.is_file():
            return  # a device or a pipe
        place = followed(path) if is_folder else followed(path).parent
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise (_link_to_itself(path) if error.errno == errno.ELOOP else cannot_write(path, error)) from error


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes ``path`` when the block ends without an exception.

    An existing folder is replaced as a whole. When the block fails, or the change of places does, the old folder stays
    as it was and the temporary one is removed. A symbolic link is followed: what it points at is replaced.

    NOTE: a folder cannot be exchanged in one portable step. A process killed between the two renames leaves the old
    content beside ``path`` as ``.NAME.XXXXXXXX.old``, which takes its place again when ``path`` is next written.

    Raises:
        ArtifactError: ``path`` is a file, or the folder cannot be written.
    """
    try:
        place = path.resolve()
    except (OSError, RuntimeError):  # as older Pythons call it
        raise _link_to_itself(path) from None
    if place.exists() and not place.is_dir():
        raise ArtifactError(f"{shown(path)} is a file where a folder belongs; move it away or choose another name.")
    temporary = _temporary_sibling(place)
    try:
        _tidy(place)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    with in_use(temporary):
        try:
            yield temporary
            _open_tree(temporary)
            _fsync_tree(temporary)
            _change_places(temporary, place)
        except OSError as error:
            # A write that fails names no file, so it is one of those in here; a file elsewhere has its own sentence.
            if (
                error.filename is None
                or Path(error.filename).is_relative_to(temporary)
                or Path(error.filename) == place
            ):
                raise cannot_write(path, error) from error
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _tidy(place: Path) -> None:
    """Undo what a process left that was killed while it wrote the folder ``place``."""
    remove_leftovers(place.parent, place.name)
    for aside in _moved_aside(place):
        if place.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(place)


def _moved_aside(place: Path) -> list[Path]:
    pattern = beside(place.name, _ASIDE)
    with contextlib.suppress(OSError):
        return [path for path in place.parent.iterdir() if pattern.fullmatch(path.name)]
    return []


def _change_places(new: Path, place: Path) -> None:
    """Rename ``new`` to ``place``; a folder already there is moved aside first, and back if the second step fails."""
    aside = new.with_suffix(_ASIDE)
    had_old = place.exists()
    if had_old:
        place.rename(aside)
    try:
        new.rename(place)
    except BaseException:
        if had_old:
            aside.rename(place)
        raise
    _fsync_directory(place.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _temporary_sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{SUFFIX}")


def _open_tree(root: Path) -> None:
    """Let whoever may read the folder read its files too: safetensors makes its own for their owner alone."""
    usual = root.stat().st_mode & 0o666
    for entry in root.rglob("*"):
        if entry.is_file():
            entry.chmod(entry.stat().st_mode | usual)


def _fsync_tree(root: Path) -> None:
    for entry in root.rglob("*"):
        if entry.is_dir():
            _fsync_directory(entry)
        elif entry.is_file():
            with entry.open("rb+") as file:
                os.fsync(file.fileno())
    _fsync_directory(root)


def _fsync_directory(path: Path) -> None:
    """Make renames inside ``path`` durable; a system that cannot open folders (Windows) is left to its own order."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link_to_itself(path: Path) -> ArtifactError:
    return ArtifactError(f"{shown(path)} is a link to itself; remove it.")
