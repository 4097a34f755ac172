"""Finds the native library for this processor, or compiles it, and loads it.

An installed package includes a library for each level of instruction sets (``levels.py``); installing a checkout
compiles a library. The file name contains a hash of the sources: if the sources have changed, the library is compiled
again into the user's cache. Damaged libraries are not loaded.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from yggdrasil.artifacts.atomic import write_atomic
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.leftovers import remove_leftovers_once, temporary_folder
from yggdrasil.artifacts.lock import locked, tell
from yggdrasil.errors import ArtifactError, first_line
from yggdrasil.library.compiling import compile_library, digest_file, digest_of, find_compiler, library_name
from yggdrasil.library.levels import Level, chosen_levels

# Folder of the package's libraries; the environment variable YGGDRASIL_LIBRARIES sets another folder.
INSTALLED = Path(os.environ.get("YGGDRASIL_LIBRARIES") or Path(__file__).parents[1] / "native" / "lib")


class Native:
    """The native library that this process has loaded, if any."""

    library: ctypes.CDLL | None = None  # None without a library; calls release the GIL
    held: ctypes.PyDLL | None = None  # the same library; calls hold the GIL
    level: str = "none"  # name of the library's level of instruction sets; "none" without a library


def check(code: int) -> None:
    """Raise RuntimeError with the native library's message if ``code``, the result of a C call, is negative.

    Other results have the meaning that the called function defines.
    """
    if code < 0:
        raise RuntimeError(error_sentence())


def error_sentence() -> str:
    """Return the native library's message on the last call that failed in the calling thread."""
    assert Native.library is not None
    function = Native.library.yggdrasil_error
    function.restype = ctypes.c_char_p
    found: bytes = function()
    return found.decode(errors="replace")


def load_native() -> bool:
    """Load the native library for this processor, compiling it first if necessary. Return whether it is loaded.

    If the library cannot be compiled, an installed one for fewer instruction sets is loaded, or else False is returned;
    both print a warning. The result is also False on Windows, if ``YGGDRASIL_CPU_LEVEL`` is "none", and, with a
    warning, if ``YGGDRASIL_CPU_LEVEL`` names no level of this processor.
    """
    try:
        levels = chosen_levels()
    except ValueError as error:
        _say(f"{error}; PyTorch's operators are used, which are several times slower")
        return False
    if sys.platform == "win32" or not levels:
        return False
    best = levels[0]
    try:
        if _load_found(best) or _load_compiled(best):
            return True
        problem = "there is no C++ compiler"
    except (OSError, ArtifactError) as error:
        problem = first_line(error)
    if (lower := _load_lower(levels[1:])) is not None:
        _say(f"the CPU kernels for {best.name} cannot be compiled ({problem}), those for {lower} are used")
        return True
    _say(
        f"the CPU kernels cannot be compiled ({problem}); PyTorch's operators take their place, which are several "
        "times slower: install g++ or clang++"
    )
    return False


def _load_found(level: Level) -> bool:
    """Load an intact library from the package or the user's cache; return whether there is one."""
    name = library_name(level)
    remove_leftovers_once(_kept())
    for library in (INSTALLED / name, _kept() / name):
        if _is_whole(library, tells=False):  # needs no write access to the cache
            _open(library, level)
            return True
    return False


def _load_compiled(level: Level) -> bool:
    """Compile the library into the user's cache and load it; return False without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        return False
    library = _kept() / library_name(level)
    with locked(library.with_suffix(".lock"), "compiling the CPU kernels", wait=tell):
        if _is_whole(library):  # another process has compiled it meanwhile
            _open(library, level)
        else:
            _compile(compiler, level, library)
    return True


def _load_lower(levels: Sequence[Level]) -> str | None:
    """Load the package's first intact library of ``levels``; return the name of its level, or None without any."""
    for level in levels:
        library = INSTALLED / library_name(level)
        if _is_whole(library, tells=False):
            _open(library, level)
            return level.name
    return None


def _kept() -> Path:
    return cache_root() / "kernels"


def _open(library: Path, level: Level) -> None:
    Native.library = ctypes.CDLL(str(library))
    Native.held = ctypes.PyDLL(str(library))
    Native.level = level.name


def _is_whole(library: Path, *, tells: bool = True) -> bool:
    """Return whether the library exists and matches its hash: using an incomplete one would crash the process."""
    beside = digest_file(library)
    if not library.exists() or not beside.exists():
        return False
    if beside.read_bytes() == digest_of(library):
        return True
    if tells:
        _say(f"{library} is damaged and is compiled again")
    return False


def _say(sentence: str) -> None:
    print(f"yggdrasil: {sentence}", file=sys.stderr)  # noqa: T201


def _compile(compiler: str, level: Level, library: Path) -> None:
    """Compile the library, load it, and store it with its hash; if storing fails, the loaded library is still used.

    Raises OSError if the compiler fails.
    """
    with temporary_folder(library.parent) as folder:
        output = folder / library.name
        _say(f"compiling the CPU kernels for {level.name}, once on this machine (about 30 s)")
        compile_library(compiler, level, output, folder)
        _open(output, level)  # before storing it: a compiler may report success after writing an incomplete file
        keep_library(output, library)


def keep_library(output: Path, library: Path) -> None:
    """Move the compiled library ``output`` to the path ``library``, and write a hash file into the same folder.

    If this fails, a warning is printed and nothing is raised.
    """
    try:
        digest = digest_of(output)
        digest_file(library).unlink(missing_ok=True)
        output.replace(library)
        write_atomic(digest_file(library), digest)
    except (OSError, ArtifactError) as error:
        _say(f"the CPU kernels could not be kept, the next start compiles them again: {first_line(error)}")
