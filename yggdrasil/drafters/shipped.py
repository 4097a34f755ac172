"""Heads that come with the package, each named after the model whose states it reads."""

from pathlib import Path

from yggdrasil.errors import YggdrasilError

PREFIX = "yggdrasil:"
_HEADS = Path(__file__).resolve().parents[1] / "assets" / "heads"


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
