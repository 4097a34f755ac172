"""Heads and n-gram tables that come with the package.

A head is named after the model whose states it reads, a table after the fingerprint of the model that wrote its text.
"""

from pathlib import Path

from yggdrasil.errors import YggdrasilError

PREFIX = "yggdrasil:"
_ASSETS = Path(__file__).resolve().parents[1] / "assets"
_HEADS, _TABLES = _ASSETS / "heads", _ASSETS / "tables"


def whole_name(name: str) -> str:
    """The folder that ``yggdrasil:NAME`` stands for; any other name as it is.

    Raises:
        YggdrasilError: no such head is shipped.
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
    """The folder with the n-gram table of a model and its scorer; None where none is shipped."""
    folder = _TABLES / fingerprint
    return folder if folder.is_dir() else None
