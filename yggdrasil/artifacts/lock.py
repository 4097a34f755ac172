"""One process at a time: a lock file that says who holds it, and that ends with its owner."""

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

_FAMILY = os.getpid()  # of this process and of every fork of it: what they do, one command does
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def tell(sentence: str) -> None:
    """Say what is waited for, to whoever runs a command."""
    print(f"yggdrasil: {sentence}", file=sys.stderr)  # noqa: T201


@contextlib.contextmanager
def locked(path: Path, what: str, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs. A lock whose owner died is free: the system releases it.

    Folders that it makes for the file go with it where the block has put nothing there.

    With ``wait`` the end of another process's block is waited for, of which it is told in a sentence; not of a fork's
    of the same command.

    Raises:
        ArtifactError: another process holds it, and is not waited for, and the sentence says which, and since when; or
            the file cannot be made.
    """
    made = _make_folders(path)
    try:
        import fcntl  # noqa: F401
    except ImportError:  # Windows: two at once are on their own
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
        file.close()  # its owner ended between the two lines above and took the file along
    with file:
        try:
            with contextlib.suppress(OSError):  # a full disk: it locks without its text
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"{os.getpid()} {time.time():.0f} {_FAMILY}\n".encode())
            yield
        finally:
            with contextlib.suppress(OSError):  # a folder is in use, or nothing is written there any more
                path.unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()


def _take(file: IO[bytes], path: Path, *, waits: bool) -> bool:
    """Lock the open file; False where another process holds it.

    Where the file system knows no locks, two at once are on their own, as on Windows.
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
    """Those that were missing above ``path``, the lowest first."""
    try:
        missing = [folder for folder in path.absolute().parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    return missing


def _open(path: Path) -> IO[bytes]:
    try:
        with contextlib.suppress(FileNotFoundError):  # its last owner took the folder along
            return path.open("ab", buffering=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError as error:
        raise cannot_write(path, error) from error


def _is_there(file: IO[bytes], path: Path) -> bool:
    """Whether the open file is still the one of that name: a lock on another is nobody's hindrance."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _owner(path: Path) -> str:
    try:
        process, since, _ = path.read_text().split()
        return f"in process {int(process)}, begun {max(0, time.time() - int(since)):.0f} s ago"
    except (OSError, ValueError):
        return "in another process"


def _is_held_by_family(path: Path) -> bool:
    try:
        process, _, family = map(int, path.read_text().split())
        return family == _FAMILY and process != os.getpid()
    except (OSError, ValueError):
        return False
