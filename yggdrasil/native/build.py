"""Compile the native operators once a machine, their sources side by side, and load them as one library.

The library is kept in the user's cache under a name that holds everything that could make it unfit: the sources, the
PyTorch build, the compiler and the processor's features.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from yggdrasil.artifacts.atomic import write_atomic
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.leftovers import remove_leftovers_once, temporary_folder
from yggdrasil.artifacts.lock import locked, tell
from yggdrasil.errors import ArtifactError, first_line

_FOLDER, _TORCH = Path(__file__).parent, Path(torch.__file__).parent
_SOURCES = [_FOLDER / name for name in ("ops.cpp", "quantised.cpp", "programs.cpp")]
_FLAGS = ["-O3", "-march=native", "-pthread", "-std=c++20", "-fPIC"]


def load_native() -> bool:
    """Load the native operators, compiling them first if need be.

    False where that cannot be: no C++ compiler, or one that fails; a cache that cannot be read or written. Each but the
    first is said in one sentence.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or sys.platform == "win32":
        return False
    library = cache_root() / "kernels" / f"ops-{_key(compiler)}.so"
    remove_leftovers_once(library.parent)
    try:
        if _is_whole(library, tells=False):  # a cache that cannot be written does for this
            _open(library)
            return True
        with locked(library.with_suffix(".lock"), "compiling the CPU kernels", wait=tell):
            if _is_whole(library):  # compiled by another process, which was waited for
                _open(library)
            else:
                _compile(compiler, library)
    except (OSError, ArtifactError) as error:
        _say(f"the CPU kernels cannot be used, the slower portable ones take their place: {first_line(error)}")
        return False
    return True


def _open(library: Path) -> None:
    """Load the library, once a process: of two copies, each would register the operators."""
    torch.ops.load_library(str(library))
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # compiled steps call its functions by name


def _is_whole(library: Path, *, tells: bool = True) -> bool:
    """Whether the library is there and is what was compiled: half a library ends the process when it is used."""
    beside = _digest_file(library)
    if not library.exists() or not beside.exists():
        return False
    if beside.read_bytes() == _digest(library):
        return True
    if tells:
        _say(f"{library} is damaged and is compiled again")
    return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(library: Path) -> bytes:
    return hashlib.sha256(library.read_bytes()).hexdigest().encode()


def _say(sentence: str) -> None:
    print(f"yggdrasil: {sentence}", file=sys.stderr)  # noqa: T201


def _key(compiler: str) -> str:
    sources = [path.read_text() for path in sorted(_FOLDER.rglob("*.[ch]*")) if path.suffix in (".cpp", ".h")]
    parts = [*sources, torch.__version__, compiler, platform.machine(), _cpu_features(), *_FLAGS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return line
    return platform.processor()


def _compile(compiler: str, library: Path) -> None:
    """Compile the library, load it, and keep it with its digest beside it; OSError says what did not work.

    What is loaded is used, even where it cannot be kept.
    """
    libraries = [f"-L{_TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    with temporary_folder(library.parent) as folder:
        output = folder / library.name
        objects = [str(folder / f"{source.stem}.o") for source in _SOURCES]
        _say("compiling the CPU kernels, once on this machine (about 20 s)")
        pairs = zip(_SOURCES, objects, strict=True)
        _run_all([[compiler, *_FLAGS, *_of_torch(), "-c", str(source), "-o", object_] for source, object_ in pairs])
        _run_all([[compiler, "-shared", "-pthread", *objects, *libraries, "-o", str(output)]])
        _open(output)  # before it counts: a compiler may end well and have written half
        try:
            digest = _digest(output)
            _digest_file(library).unlink(missing_ok=True)
            output.replace(library)
            write_atomic(_digest_file(library), digest)
        except (OSError, ArtifactError) as error:
            _say(f"the CPU kernels could not be kept, the next start compiles them again: {first_line(error)}")


def _of_torch() -> list[str]:
    return [
        f"-I{_FOLDER}", f"-I{_TORCH / 'include'}", f"-I{_TORCH / 'include/torch/csrc/api/include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]  # fmt: skip


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run compilers side by side; OSError says what went wrong with the first that failed."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
            )
        for command, process in zip(commands, running, strict=True):
            said = process.communicate()[0].strip() or "and said nothing"
            if process.returncode != 0:
                raise OSError(f"{command[0]} ended with code {process.returncode}: {first_line(said)}")
    finally:
        for process in running:
            process.kill()
            process.wait()
