"""Where what is compiled on this machine is kept."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Folder of everything compiled on this machine; ``YGGDRASIL_CACHE`` moves it."""
    own = os.environ.get("YGGDRASIL_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "yggdrasil"
