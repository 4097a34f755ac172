"""Compile ``ops.cpp`` once a machine and load it.

The library is kept in the user's cache under a name that holds everything that could make it unfit: the sources, the
PyTorch build, the compiler and the processor's features.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("ops.cpp")
_FLAGS = ["-O3", "-march=native", "-pthread", "-std=c++20", "-fPIC", "-shared"]


def cache_root() -> Path:
    """Folder of everything compiled on this machine; ``YGGDRASIL_CACHE`` moves it."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "yggdrasil"
    return Path(os.environ.get("YGGDRASIL_CACHE", default))


def load_native() -> bool:
    """Load the native operators, compiling them first if need be. False where there is no C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or sys.platform == "win32":
        return False
    library = cache_root() / "kernels" / f"ops-{_key(compiler)}.so"
    if not library.exists() and not _compile(compiler, library):
        return False
    torch.ops.load_library(str(library))
    return True


def _key(compiler: str) -> str:
    sources = [path.read_text() for path in sorted(_SOURCE.parent.glob("*.[ch]*")) if path.suffix in (".cpp", ".h")]
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


def _compile(compiler: str, library: Path) -> bool:
    library.parent.mkdir(parents=True, exist_ok=True)
    torch_root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        command = [
            compiler, *_FLAGS, f"-I{torch_root / 'include'}", f"-I{torch_root / 'include/torch/csrc/api/include'}",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", str(_SOURCE),
            f"-L{torch_root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(output),
        ]  # fmt: skip
        print("yggdrasil: compiling the CPU kernels, once on this machine (about 15 s)", file=sys.stderr)  # noqa: T201
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            reason = finished.stderr.strip().splitlines()[:3]
            print(f"yggdrasil: {compiler} failed, using the slower portable kernels: {reason}", file=sys.stderr)  # noqa: T201
            return False
        output.replace(library)
    return True
