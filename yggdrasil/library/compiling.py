"""Compiles the native library for one level of instruction sets.

Uses only the standard library: ``setup.py`` imports it before anything is installed.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

SOURCES = Path(__file__).parents[1] / "native"
_UNITS = ("programs", "quantised", "ops", "trees", "recurrence")  # the slowest to compile first
_FLAGS = ("-O3", "-pthread", "-std=c++20", "-fPIC", "-fvisibility=hidden")


class _Level(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def flags(self) -> tuple[str, ...]: ...


def find_compiler() -> str | None:
    """Return the value of the environment variable ``CXX``, or else the path of g++ or clang++, or else None."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def library_name(level: _Level) -> str:
    """Return the native library's file name for ``level``, LEVEL-HASH.so, with a hash of sources and compiler flags."""
    paths = [*sorted(SOURCES.rglob("*.h")), *(SOURCES / f"{unit}.cpp" for unit in _UNITS)]
    digest = hashlib.sha256(" ".join((*_FLAGS, *level.flags)).encode())
    for path in paths:
        digest.update(path.read_bytes())
    return f"{level.name}-{digest.hexdigest()[:16]}.so"


def compile_library(compiler: str, level: _Level, output: Path, folder: Path) -> None:
    """Compile the native library for ``level`` to the file ``output``. Object files are written to ``folder``.

    Raises:
        OSError: the compiler fails.
    """
    flags = [*_FLAGS, *level.flags, f"-I{SOURCES}"]
    objects = [str(folder / f"{unit}.o") for unit in _UNITS]
    run_all(
        [compiler, *flags, "-c", str(SOURCES / f"{unit}.cpp"), "-o", object_]
        for unit, object_ in zip(_UNITS, objects, strict=True)
    )
    run_all([[compiler, "-shared", "-pthread", *objects, "-o", str(output)]])


def install_library(compiler: str, level: _Level, folder: Path) -> Path:
    """Compile the native library for ``level`` into ``folder``, with its hash file, and return the library's path.

    The folder is created if necessary. If it already has an intact library of the present sources, nothing is compiled.
    Libraries of this level from other sources are deleted after compiling.

    Raises:
        OSError: the compiler fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / library_name(level)
    if library.is_file() and _recorded(library) == digest_of(library):
        return library
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / library.name
        compile_library(compiler, level, made, Path(temporary))
        for old in folder.glob(f"{level.name}-*"):
            old.unlink()
        shutil.copyfile(made, library)
        digest_file(library).write_bytes(digest_of(library))
    return library


def digest_file(library: Path) -> Path:
    """Return the path of the file with the hash of ``library``: the same name with the suffix .sha256."""
    return library.with_suffix(".sha256")


def _recorded(library: Path) -> bytes | None:
    path = digest_file(library)
    return path.read_bytes() if path.is_file() else None


def digest_of(library: Path) -> bytes:
    """Return the SHA-256 hash of the file ``library`` as hexadecimal digits in ASCII."""
    return hashlib.sha256(library.read_bytes()).hexdigest().encode()


def run_all(commands: Iterable[Sequence[str]]) -> None:
    """Run all commands (program and arguments) in parallel, and wait until they have ended.

    Raises:
        OSError: a command fails. The message has the command's first line of output; other commands are killed.
    """
    running: list[tuple[Sequence[str], subprocess.Popen[str]]] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            running.append((command, process))
        for command, process in running:
            said = process.communicate()[0].strip() or "without output"
            if process.returncode != 0:
                first = said.splitlines()[0]
                raise OSError(f"{command[0]} ended with code {process.returncode}: {first}")
    finally:
        for _, process in running:
            process.kill()
            process.wait()
