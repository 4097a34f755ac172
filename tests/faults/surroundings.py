"""What may be wrong around a command: streams, folders, limits, the compiler, the cache, permissions."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

NOBODY = 65534
# Text for a compiler's place, by what becomes of it.
COMPILERS = {
    "fails": "exit 1", "is killed": "kill -9 $$", "says nothing and writes nothing": "exit 0",
    "writes half": 'for last; do :; done; head -c 1000 /dev/urandom > "$last"',
}  # fmt: skip


class Surrounding(NamedTuple):
    """What is changed about a run, and how it may end besides well."""

    done: str
    options: dict[str, Any]  # of forked.Run
    names: Sequence[str] = ()
    codes: Sequence[int] = (2,)
    is_away: bool = False  # the pair is named by absolute paths


def surrounding(folder: Path, random: Random) -> Surrounding:
    """One that is wrong, made in ``folder``."""
    return random.choice((_stream, _place, _place, _limit, _compiler, _permission))(folder, random)


def _stream(folder: Path, random: Random) -> Surrounding:
    return random.choice((
        Surrounding("standard output is full", {"stdout": "/dev/full"}, ["standard output"]),
        Surrounding("standard output is closed", {"closed": [1]}, ["standard output"]),
        Surrounding("standard input is closed", {"closed": [0]}),
        Surrounding("ascii", {"environment": {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}}),
    ))  # fmt: skip


def _place(folder: Path, random: Random) -> Surrounding:
    """Folders of the environment that are none."""
    if random.random() < 0.1:
        return Surrounding("the working directory is gone", {"from_nowhere": True}, ["directory"], is_away=True)
    (folder / "file").touch()
    place = random.choice(("file", "file/below", "/proc/none", "no/such", "x" * 300, "/dev/null"))
    where = place if place.startswith("/") else str(folder / place)
    name = random.choice(("HOME", "XDG_CACHE_HOME", "YGGDRASIL_CACHE", "TMPDIR", "HF_HOME"))
    others = {"HOME": {"XDG_CACHE_HOME": "", "YGGDRASIL_CACHE": ""}, "XDG_CACHE_HOME": {"YGGDRASIL_CACHE": ""}}
    return Surrounding(f"{name}={place:.20}", {"environment": {**others.get(name, {}), name: where, **_no_compiler()}})


def _limit(folder: Path, random: Random) -> Surrounding:
    name, least, most = random.choice(
        (("RLIMIT_FSIZE", 0, 20000), ("RLIMIT_NOFILE", 4, 64), ("RLIMIT_AS", 2**30, 2**33))
    )
    size = random.randrange(least, most)
    return Surrounding(f"{name} {size}", {"limits": {name: size}, "environment": _no_compiler()})


def _compiler(folder: Path, random: Random) -> Surrounding:
    """Kernels are wanted anew and cannot be had: the portable ones take their place."""
    kind = random.choice([*COMPILERS, "is not there", "is a folder"])
    path = folder / "compiler"
    if kind in COMPILERS:
        path.write_text(f"#!/bin/sh\n{COMPILERS[kind]}\n")
        path.chmod(0o755)
    elif kind == "is a folder":
        path.mkdir()
    cache = {"YGGDRASIL_CACHE": str(folder / "cache")}
    return Surrounding(f"the compiler {kind}", {"environment": {"CXX": str(path), **cache}})


def _permission(folder: Path, random: Random) -> Surrounding:
    """Another user, who may read all but one file or folder."""
    library = Path(os.__file__)
    if os.getuid() != 0 or not all(parent.stat().st_mode & 1 for parent in library.parents):
        return _place(folder, random)  # only root becomes another, who must be able to run Python
    chosen = random.choice((
        "prompts.jsonl", "plans", "predictors", "target", "drafter", "target/config.json", "target/model.safetensors",
        "target/tokenizer.json", "drafter/model.safetensors",
    ))  # fmt: skip
    path = folder / chosen
    path.chmod(0)
    names = [chosen, path.name, "faults"]
    return Surrounding(f"{chosen} may not be read", {"user": NOBODY, "environment": _no_compiler()}, names)


def _no_compiler() -> dict[str, str]:
    """Kernels that are not in the cache are not compiled: that takes half a minute and is not the point."""
    return {"CXX": "false", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
