"""Lock files: each admits one process at a time, records that process, and is released when the process ends."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from yggdrasil.artifacts.atomic import cannot_write, shown
from yggdrasil.errors import ArtifactError

_FAMILY = os.getpid()  # common to this process and its forks, which run the same command
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def tell(sentence: str) -> None:
    """Print ``yggdrasil: SENTENCE`` to standard error; made for the argument ``wait`` of ``locked``."""
    print(f"yggdrasil: {sentence}", file=sys.stderr)  # noqa: T201


@contextlib.contextmanager
def locked(path: Path, what: str, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs. The system releases the lock of a process that dies.

    Missing parent folders of the file are created, and removed afterwards if they are empty. On Windows, the block runs
    without a lock.

    Args:
        what: the work in progress, for messages, such as "compiling the CPU kernels".
        wait: function that takes a sentence; it is called before waiting for another process that holds the lock,
            unless that process is this command's own parent or fork. None: a held lock is an error.

    Raises:
        ArtifactError: another process holds the lock and ``wait`` is None, or the file cannot be created.
    """
    made = _make_folders(path)
    try:
        import fcntl  # noqa: F401
    except ImportError:  # Windows: without locks
        yield
        return
    while True:
        file = _open(path)
        if not _take(file, path, waits=False):
            if wait is None:
                file.close()
                raise ArtifactError(f"{what} is under way {_owner(path)}; wait for it to end, or end it.")
            if not _is_held_by_family(path):
                wait(f"{what} is under way {_owner(path)}: waiting for its end")
            _take(file, path, waits=True)
        if _is_there(file, path):
            break
        file.close()  # its owner removed the file between opening and locking it
    with file:
        try:
            with contextlib.suppress(OSError):  # on a full disk, the lock has no owner text
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"{os.getpid()} {time.time():.0f} {_FAMILY}\n".encode())
            yield
        finally:
            with contextlib.suppress(OSError):  # a folder is not empty, or cannot be written any more
                path.unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()


def _take(file: IO[bytes], path: Path, *, waits: bool) -> bool:
    """Lock the open file; return False if another process holds the lock.

    Returns True without a lock on file systems that do not support locks.
    """
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise ArtifactError(
                f"cannot lock {shown(path)} ({error.strerror}); check the disk that it is on."
            ) from error
    return True


def _make_folders(path: Path) -> list[Path]:
    """Create the missing parent folders of ``path`` and return them, the innermost first."""
    try:
        missing = [folder for folder in path.absolute().parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    return missing


def _open(path: Path) -> IO[bytes]:
    try:
        with contextlib.suppress(FileNotFoundError):  # its last owner removed the folder
            return path.open("ab", buffering=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError as error:
        raise cannot_write(path, error) from error


def _is_there(file: IO[bytes], path: Path) -> bool:
    """Return whether ``path`` still names the open file; a lock on a removed file excludes nobody."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _owner(path: Path) -> str:
    """Return a description, for messages, of the process that holds the lock file ``path``."""
    try:
        process, since, _ = path.read_text().split()
        return f"in process {int(process)}, begun {max(0, time.time() - int(since)):.0f} s ago"
    except (OSError, ValueError):
        return "in another process"


def _is_held_by_family(path: Path) -> bool:
    """Return whether another process of this command (a fork or its parent) holds the lock."""
    try:
        process, _, family = map(int, path.read_text().split())
        return family == _FAMILY and process != os.getpid()
    except (OSError, ValueError):
        return False
