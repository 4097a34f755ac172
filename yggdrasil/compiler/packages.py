"""Compiled packages on disk: each with a manifest beside it that says what it must hold and what else it needs.

A package counts as there when its manifest does, which is written last; one whose bytes do not fit is removed, and so
compiled again.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yggdrasil.artifacts.atomic import write_atomic
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.leftovers import remove_leftovers_once, temporary_folder
from yggdrasil.artifacts.lock import locked, tell
from yggdrasil.artifacts.plain import parse_json
from yggdrasil.compiler.unpacked import nothing_stays, unpacked_in, why_not_unpacked
from yggdrasil.errors import YggdrasilError, first_line
from yggdrasil.native import is_native  # packages call torch.ops.yggdrasil
from yggdrasil.native.packages import runs_packages

SUFFIX = ".pt2"
_MANIFEST_SUFFIX = ".json"


class Manifest(NamedTuple):
    """What lies beside a package."""

    digest: str  # of the package's bytes
    units: tuple[str, ...]  # names of packages that it calls
    inputs: tuple[int, ...] | None  # places of the step's inputs that it reads; None: all


def package_folder() -> Path:
    """Where packages lie."""
    return cache_root() / "steps"


def unit_path(name: str) -> Path:
    """The package of a unit that steps call by ``name``."""
    return package_folder() / f"{name}{SUFFIX}"


def manifest_path(path: Path) -> Path:
    return path.with_suffix(_MANIFEST_SUFFIX)


def is_whole(path: Path) -> bool:
    """Whether the package and all that it calls are there and undamaged; what is damaged is removed and named."""
    manifest = read_manifest(path)
    return manifest is not None and all(is_whole(unit_path(name)) for name in manifest.units)


def read_manifest(path: Path) -> Manifest | None:
    """The package's manifest if both are whole; what is damaged is removed, with one sentence."""
    beside = manifest_path(path)
    found = b""
    try:
        found = beside.read_bytes()
        content = parse_json(found)
        seal = content.pop("seal")
        inputs = content["inputs"]
        manifest = Manifest(
            str(content["digest"]),
            tuple(map(str, content["units"])),
            None if inputs is None else tuple(map(int, inputs)),
        )
        if seal == _seal(content) and manifest.digest == file_digest(path):
            return manifest
    except FileNotFoundError:  # half of a pair: its writer was killed in between, or is about to write the other
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    if _now(beside) != found:  # another process has put a package in the place of the one that it told of
        return read_manifest(path)
    print(f"yggdrasil: {path} is damaged and is compiled again", file=sys.stderr)  # noqa: T201
    remove_package(path)
    return None


def _now(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def remove_package(path: Path) -> None:
    """The manifest goes first: a package without one does not count."""
    manifest_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


@contextmanager
def compiling(path: Path) -> Iterator[bool]:
    """Let one process at a time compile; yields whether the package is still missing, when its turn has come.

    TorchInductor's own files of equal graphs lie in one place, whoever makes them. Of two processes that began with one
    model at the same time, one packed a file that the other was just writing.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # here: a package that is there needs no compiler

    with locked(Path(cache_dir()) / "yggdrasil.lock", "compiling steps", wait=tell):
        yield not is_whole(path)


@contextmanager
def new_package(path: Path, units: Sequence[str] = (), inputs: Sequence[int] | None = None) -> Iterator[Path]:
    """Yield a place to write the package to; it takes its own, manifest last, when the block ends without a fault."""
    with temporary_folder(path.parent) as folder:
        temporary = folder / path.name
        yield temporary
        manifest = {"digest": file_digest(temporary), "units": units, "inputs": inputs}
        manifest_path(path).unlink(missing_ok=True)
        temporary.replace(path)
        write_atomic(manifest_path(path), json.dumps({**manifest, "seal": _seal(manifest)}).encode())


def _seal(manifest: object) -> str:
    """Digest of what a manifest says: inputs in another order would be taken without a word."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes: the processor has instructions for it, a gigabyte and more a second."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Package(NamedTuple):
    """A package in memory."""

    loader: Any
    inputs: tuple[int, ...] | None  # places of the step's inputs that it takes; None: all

    def over(self, inputs: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """The package over a step's inputs; Python's other threads go on while it runs, where operators are native."""
        taken = list(inputs) if self.inputs is None else [inputs[place] for place in self.inputs]
        if not isinstance(self.loader, torch.ScriptObject):
            return partial(self.loader.run, taken)
        run: Callable[[], Sequence[Tensor]] = torch.classes.yggdrasil_packages.Run(self.loader, taken).run
        return run


@cache
def open_package(path: Path) -> Package:
    """Load a whole package and what it calls, once a process; all its users share it.

    Raises:
        YggdrasilError: it is as it was written, and PyTorch cannot load it all the same: it is removed, unless the
            temporary folder is at fault.
    """
    remove_leftovers_once(path.parent)
    manifest = read_manifest(path)
    assert manifest is not None, f"{path} is not there"
    for name in manifest.units:
        _opened(unit_path(name), partial(torch.ops.yggdrasil.open_unit, name))
    return Package(_opened(path, _loader), manifest.inputs)


def _opened(path: Path, open_file: Callable[[str], Any]) -> Any:
    try:
        with nothing_stays():
            return open_file(str(path))
    except RuntimeError as error:
        temporary = unpacked_in()
        reason = why_not_unpacked(path, temporary)
        if reason is not None:
            raise YggdrasilError(
                f"{path} cannot be unpacked in the temporary folder {temporary} ({reason}); mend that, or let TMPDIR "
                "name another folder, with room and where code may run"
            ) from error
        remove_package(path)
        raise YggdrasilError(
            f"{path} cannot be loaded ({first_line(error)[:200]}) and was removed; run the same command again, it is "
            "compiled anew"
        ) from error


def _loader(path: str) -> Any:
    if is_native() and runs_packages():
        return torch.classes.yggdrasil_packages.Package(path)
    # What torch._inductor.aoti_load_package does in the end, after two seconds of importing the compiler.
    return torch._C._aoti.AOTIModelPackageLoader(path, "model", True, 1, -1)  # single-threaded, one runner


def any_is_open() -> bool:
    """Whether this process loaded a package, and so may have run it."""
    return open_package.cache_info().currsize > 0
