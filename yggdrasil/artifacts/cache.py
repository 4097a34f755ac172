"""The folder of cached and compiled files."""

import os
from pathlib import Path

from yggdrasil.artifacts.homes import user_cache


def cache_root() -> Path:
    """Return the folder of cached files: ``$YGGDRASIL_CACHE``, or ``yggdrasil`` in the user's cache folder.

    Raises:
        ArtifactError: the folder is not set, and neither XDG_CACHE_HOME nor a home folder is known.
    """
    own = os.environ.get("YGGDRASIL_CACHE")
    return Path(own) if own else user_cache() / "yggdrasil"
