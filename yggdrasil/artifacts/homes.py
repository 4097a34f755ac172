"""Home folders: expansion of ``~``, and the user's cache folder."""

import os
from pathlib import Path

from yggdrasil.errors import ArtifactError


def expanded(path: str | Path) -> Path:
    """Return ``path`` with a leading ``~`` or ``~user`` replaced by the home folder.

    Raises:
        ArtifactError: the user does not exist, or your home folder is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0].removeprefix("~")
        if not user:
            raise ArtifactError(f"{path}: your home folder is not known; set HOME, or give the whole path") from None
        raise ArtifactError(f"{path}: there is no user {user}; a file of that name is ./{path}") from None


def user_cache() -> Path:
    """Return the user's cache folder: ``$XDG_CACHE_HOME``, or ``~/.cache``.

    Raises:
        ArtifactError: neither XDG_CACHE_HOME nor a home folder is known.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(named) if named else Path.home() / ".cache"
    except RuntimeError:
        raise ArtifactError("your home folder is not known, and so no cache; set HOME or XDG_CACHE_HOME") from None
