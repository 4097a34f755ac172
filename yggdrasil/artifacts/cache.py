"""Where what is compiled on this machine is kept."""

import os
from pathlib import Path

from yggdrasil.artifacts.homes import user_cache


def cache_root() -> Path:
    """Folder of everything compiled on this machine; ``YGGDRASIL_CACHE`` moves it."""
    own = os.environ.get("YGGDRASIL_CACHE")
    return Path(own) if own else user_cache() / "yggdrasil"
