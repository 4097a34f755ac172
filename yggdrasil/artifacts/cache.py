"""The folder of cached and compiled files."""

import os
from pathlib import Path

from yggdrasil.artifacts.homes import user_cache


def cache_root() -> Path:
    """Return the folder of cached files: ``$YGGDRASIL_CACHE``, or ``yggdrasil`` in the user's cache folder.

    Raises:
        ArtifactError: YGGDRASIL_CACHE and XDG_CACHE_HOME are not set, and no home folder is known.
    """
    own = os.environ.get("YGGDRASIL_CACHE")
    return Path(own) if own else user_cache() / "yggdrasil"
