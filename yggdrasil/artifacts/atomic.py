"""Write files and folders atomically."""

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from yggdrasil.artifacts.leftovers import SUFFIX, in_use, remove_leftovers, temporary_name_pattern
from yggdrasil.errors import ArtifactError

_ASIDE = ".old"


def shown(path: Path) -> str:
    """Return ``path``, unresolved, for messages: relative if it begins with the working directory, else absolute."""
    absolute = path.absolute()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


def cannot_write(path: Path, error: OSError) -> ArtifactError:
    """Return the ArtifactError that says why the file or folder ``path`` cannot be written, from ``error``."""
    reason = error.strerror or str(error)
    return ArtifactError(f"cannot write {shown(path)} ({reason}); check the folder's permissions and free space.")


def resolve_link(path: Path) -> Path:
    """Return the final target of a symbolic link. Other paths, and links to themselves, are returned unchanged."""
    try:
        return path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError):  # older Pythons raise RuntimeError for a link to itself
        return path


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to the file ``path`` so that a reader sees the old content or the new, never a part.

    The data go to a temporary file in the same folder, which is flushed and renamed. Missing parent folders are
    created. Devices and pipes are written directly. Of a symbolic link, the target is replaced.

    Raises:
        ArtifactError: the file cannot be written; its old content is unchanged.
    """
    destination = resolve_link(path)
    temporary = _temporary_sibling(destination)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        destination.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(destination.parent, destination.name)
        with temporary.open("xb") as file, in_use(temporary):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(destination)
        _fsync_directory(destination.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(path: Path, *, is_folder: bool = False) -> None:
    """Check, without writing, that ``path`` can be written later as a file, or as a folder of files (``is_folder``).

    Missing parent folders are no fault if the nearest existing one can be written.

    Raises:
        ArtifactError: ``path`` is a folder instead of a file or the reverse, or no file can be created there.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # raises for a link to itself, unlike exists()
        if path.exists() and path.is_dir() != is_folder:
            found, wanted = ("file", "folder") if is_folder else ("folder", "file")
            raise ArtifactError(f"{shown(path)} is a {found}, not a {wanted}; name another.")
        if path.exists() and not is_folder and not path.is_file():
            return  # a device or a pipe
        destination = resolve_link(path) if is_folder else resolve_link(path).parent
        while not destination.exists():
            destination = destination.parent
        with tempfile.TemporaryFile(dir=destination):
            pass
    except OSError as error:
        raise (_link_to_itself(path) if error.errno == errno.ELOOP else cannot_write(path, error)) from error


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes ``path`` when the block ends without an exception.

    An existing folder is replaced as a whole. If the block or the renaming fails, the old folder is unchanged and the
    temporary folder is removed. Of a symbolic link, the target is replaced.

    NOTE: a folder cannot be exchanged in one portable step. A process killed between the two renames leaves the old
    content in the same folder as ``.NAME.XXXXXXXX.old``, which is restored when ``path`` is next written.

    Raises:
        ArtifactError: if ``path`` is a file, or the folder cannot be written.
    """
    try:
        destination = path.resolve()
    except (OSError, RuntimeError):  # older Pythons raise RuntimeError for a link to itself
        raise _link_to_itself(path) from None
    if destination.exists() and not destination.is_dir():
        raise ArtifactError(f"{shown(path)} is a file where a folder belongs; move it away or choose another name.")
    temporary = _temporary_sibling(destination)
    try:
        _tidy(destination)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    with in_use(temporary):
        try:
            yield temporary
            _open_tree(temporary)
            _fsync_tree(temporary)
            _exchange(temporary, destination)
        except OSError as error:
            # An error without a file name is of a write to a file in this folder. Errors of other files pass through.
            if (
                error.filename is None
                or Path(error.filename).is_relative_to(temporary)
                or Path(error.filename) == destination
            ):
                raise cannot_write(path, error) from error
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _tidy(destination: Path) -> None:
    """Clean up after a process that was killed while it wrote the folder ``destination``."""
    remove_leftovers(destination.parent, destination.name)
    for backup in _backups(destination):
        if destination.exists():
            shutil.rmtree(backup, ignore_errors=True)
        else:
            backup.rename(destination)


def _backups(destination: Path) -> list[Path]:
    """Return the old versions of ``destination`` that interrupted replacements have left behind."""
    pattern = temporary_name_pattern(destination.name, _ASIDE)
    with contextlib.suppress(OSError):
        return [path for path in destination.parent.iterdir() if pattern.fullmatch(path.name)]
    return []


def _exchange(new: Path, destination: Path) -> None:
    """Rename ``new`` to ``destination``; an existing folder is renamed first, and renamed back on failure."""
    backup = new.with_suffix(_ASIDE)
    had_old = destination.exists()
    if had_old:
        destination.rename(backup)
    try:
        new.rename(destination)
    except BaseException:
        if had_old:
            backup.rename(destination)
        raise
    _fsync_directory(destination.parent)
    shutil.rmtree(backup, ignore_errors=True)


def _temporary_sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{SUFFIX}")


def _open_tree(root: Path) -> None:
    """Give files the read and write permissions of the folder: safetensors creates files for their owner alone."""
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
    """Flush renames inside ``path`` to disk; do nothing on Windows, which cannot open folders."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link_to_itself(path: Path) -> ArtifactError:
    return ArtifactError(f"{shown(path)} is a link to itself; remove it.")
