"""Users' homes: what ``~`` stands for, and where caches lie."""

import os
from pathlib import Path

from yggdrasil.errors import ArtifactError


def expanded(path: str | Path) -> Path:
    """The path with the home that a leading ``~`` or ``~user`` stands for.

    Raises:
        ArtifactError: there is no such home.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0].removeprefix("~")
        if not user:
            raise ArtifactError(f"{path}: your home folder is not known; set HOME, or give the whole path") from None
        raise ArtifactError(f"{path}: there is no user {user}; a file of that name is ./{path}") from None


def user_cache() -> Path:
    """Folder of the user's caches, as the XDG base directories have it.

    Raises:
        ArtifactError: nothing says where it lies.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(named) if named else Path.home() / ".cache"
    except RuntimeError:
        raise ArtifactError("your home folder is not known, and so no cache; set HOME or XDG_CACHE_HOME") from None
