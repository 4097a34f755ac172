"""Provenance of result files: machine, versions, commit, drafters."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yggdrasil.artifacts import current_machine

if TYPE_CHECKING:
    from yggdrasil.engine.engine import Engine

PACKAGES = ("yggdrasil", "torch", "transformers", "numpy")


def provenance() -> dict[str, Any]:
    """Return where and by which code a result was measured.

    Keys: machine (one line), python, versions (by package; None: not installed), commit ("+" at its end if the sources
    are modified; None outside a git checkout).
    """
    return {
        "machine": current_machine().describe(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def drafter_names(engine: "Engine") -> str:
    """Return the names of an engine's drafters, such as "head mine + text + table"; "nobody" if it has none.

    Absolute paths are cut to their last part.
    """
    names = (each.name.partition(" ") for each in (engine.drafter, engine.model_free) if each is not None)
    return " + ".join(kind + space + public_source(source) for kind, space, source in names) or "nobody"


def public_source(source: str) -> str:
    """Return a checkpoint's name for published results: the last part of an absolute path, a hub id unchanged.

    ``/home/me/models/Qwen3-4B`` becomes ``Qwen3-4B``.
    """
    return Path(source).name if Path(source).is_absolute() else source


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the checkout's commit, with "+" if the sources are modified; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        head, changes = (
            subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", folder.parent])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if changes.strip() else "")
