"""The library that runs TorchInductor's packages without Python's lock (``packages.cpp``), compiled when first needed.

It is made of PyTorch's C++ headers, and so belongs to one version of PyTorch. A machine that runs packages has compiled
them, and has a compiler.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.leftovers import temporary_folder
from yggdrasil.artifacts.lock import locked, tell
from yggdrasil.errors import ArtifactError, YggdrasilError, first_line
from yggdrasil.native.build import _is_whole, _say, keep_library
from yggdrasil.native.compiling import find_compiler, run_all

_SOURCE, _TORCH = Path(__file__).parent / "packages.cpp", Path(torch.__file__).parent
_FLAGS = ("-O2", "-pthread", "-std=c++20", "-fPIC", "-shared")
_tables: dict[int, Sequence[Tensor]] = {}  # tensors that steps name by number


@cache
def runs_packages() -> bool:
    """Load the library, compiling it first if need be; False where that cannot be, which is said in one sentence."""
    compiler = find_compiler()
    if compiler is None:
        return False
    parts = (_SOURCE.read_text(), torch.__version__, *_FLAGS)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    library = cache_root() / "kernels" / f"packages-{digest}.so"
    try:
        _load(library, compiler)
    except (OSError, ArtifactError) as error:
        _say(f"compiled steps keep Python's other threads waiting: {first_line(error)}")
        return False
    for number, tensors in _tables.items():
        torch.ops.yggdrasil_packages.hold_table(number, tensors)
    return True


def _load(library: Path, compiler: str) -> None:
    if _is_whole(library, tells=False):
        torch.ops.load_library(str(library))
        return
    with locked(library.with_suffix(".lock"), "compiling what runs packages", wait=tell):
        if _is_whole(library):
            torch.ops.load_library(str(library))
            return
        with temporary_folder(library.parent) as folder:
            output = folder / library.name
            _say("compiling what runs packages, once for this PyTorch (about 30 s)")
            run_all([[compiler, *_FLAGS, *_includes(), str(_SOURCE), *_libraries(), "-o", str(output)]])
            torch.ops.load_library(str(output))
            keep_library(output, library)


def _includes() -> list[str]:
    return [
        f"-I{_TORCH / 'include'}", f"-I{_TORCH / 'include/torch/csrc/api/include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]  # fmt: skip


def _libraries() -> list[str]:
    return [f"-L{_TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]


def open_unit(name: str, path: str) -> None:
    """Load a package that steps call by ``name``, once a process.

    Raises:
        YggdrasilError: there is no compiler.
    """
    if not runs_packages():
        raise YggdrasilError("steps of compiled layers need a C++ compiler; install g++ or clang++, or set CXX")
    torch.ops.yggdrasil_packages.open_unit(name, path)


def hold_table(number: int, tensors: Sequence[Tensor]) -> None:
    """Keep the tensors of a table."""
    _tables[number] = tensors
    if runs_packages.cache_info().currsize and runs_packages():
        torch.ops.yggdrasil_packages.hold_table(number, tensors)


def release_table(number: int) -> None:
    """Let the tensors of a table go."""
    _tables.pop(number, None)
    if runs_packages.cache_info().currsize and runs_packages():
        torch.ops.yggdrasil_packages.release_table(number)
