"""Paths of the draft heads and n-gram tables that the package includes.

A head is named after its target model, a table after the fingerprint of the model that generated its text.
"""

from pathlib import Path

from yggdrasil.errors import YggdrasilError

PREFIX = "yggdrasil:"
_ASSETS = Path(__file__).resolve().parents[1] / "assets"
_HEADS, _TABLES = _ASSETS / "heads", _ASSETS / "tables"


def resolve_shipped_head(name: str) -> str:
    """Return the folder of the shipped draft head ``yggdrasil:NAME``; return any other ``name`` unchanged.

    Raises:
        YggdrasilError: the package has no head of this name.
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
    """Return the folder with the shipped n-gram table and scorer of a model; None if the package has none.

    Args:
        fingerprint: fingerprint of the model's checkpoint.
    """
    folder = _TABLES / fingerprint
    return folder if folder.is_dir() else None
