"""Paths of the draft heads and n-gram tables that the package includes.

A head is named after its target model, a table after the fingerprint of the model that generated its text.
"""

from pathlib import Path

from yggdrasil.errors import YggdrasilError

PREFIX = "yggdrasil:"
_ASSETS = Path(__file__).resolve().parents[1] / "assets"
_HEADS, _TABLES = _ASSETS / "heads", _ASSETS / "tables"


def whole_name(name: str) -> str:
    """Return the folder of the shipped head ``yggdrasil:NAME``; any other name unchanged.

    Raises:
        YggdrasilError: the package has no such head.
    """
    if not name.startswith(PREFIX):
        return name
    shipped = sorted(folder.name for folder in _HEADS.glob("*") if (folder / "config.json").is_file())
    wanted = name.removeprefix(PREFIX)
    if wanted not in shipped:
        there = " and ".join(PREFIX + each for each in shipped) or "none"
        raise YggdrasilError(f"{name} is no head that comes with Yggdrasil; there is {there}")
    return str(_HEADS / wanted)


def table_folder(fingerprint: str) -> Path | None:
    """Return the folder with a model's n-gram table and scorer; None if the package has none."""
    folder = _TABLES / fingerprint
    return folder if folder.is_dir() else None
