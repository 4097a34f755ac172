"""Shortens the import of PyTorch: modules that only its compiler and quantisation need are executed when used.

PyTorch executes them with its own import, for half of its time. Here they are placeholders, executed at the first
access to a name of theirs. Those that register something, such as shape functions, are not accessed by name: all are
executed before a module that may need these is imported.
"""

import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# Not executed by ``import torch``. The order of all other imports stays PyTorch's own: its modules import each other.
_LATE = frozenset((
    "torch._meta_registrations", "torch.ao", "torch.distributions", "torch.masked", "torch.nn.intrinsic",
    "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torch.quantization",
))  # fmt: skip
_TESTED = ("2.12.", "2.13.")  # PyTorch's modules import each other, and the order differs by version
_NEEDING = frozenset(("torch._dynamo", "torch._inductor", "torch.export._trace", "transformers"))


def import_late() -> None:
    """Make ``import torch`` faster: modules only its compiler and quantisation need are executed when used.

    Call this before PyTorch is imported. Does nothing with versions of PyTorch in which it was not tested.
    """
    spec = PathFinder.find_spec("torch")
    if spec is not None and spec.origin is not None and _version(Path(spec.origin).parent).startswith(_TESTED):
        sys.meta_path.insert(0, _Finder())


def _version(package: Path) -> str:
    """Return the version of the PyTorch in ``package`` without importing it; empty if it is not written there."""
    try:
        found = re.search(r"^__version__ = '(.*)'$", (package / "version.py").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


class _Finder(MetaPathFinder):
    """Finder of the placeholders."""

    def __init__(self) -> None:
        self._found: list[ModuleType] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _NEEDING:
            sys.meta_path.remove(self)
            for module in self._found:
                _execute(module)
        spec = PathFinder.find_spec(name, path) if name in _LATE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Placeholder(spec.loader, self._found)
        return spec


class _Placeholder(Loader):
    """Loader that postpones the execution of a module to the first access to a missing name."""

    def __init__(self, loader: Loader, found: list[ModuleType]) -> None:
        self._loader, self._found = loader, found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        def look_up(name: str) -> Any:
            if name.startswith("__"):  # the import system and ``inspect`` look for these in every module
                raise AttributeError(name)
            _execute(module)
            return getattr(module, name)

        module.__dict__["__getattr__"] = look_up
        module.__dict__[_PENDING] = self._loader
        self._found.append(module)


_PENDING = "__yggdrasil_loader__"


def _execute(module: ModuleType) -> None:
    """Execute the code of a placeholder, unless that was done before."""
    loader = module.__dict__.pop(_PENDING, None)
    if loader is not None:
        del module.__dict__["__getattr__"]
        loader.exec_module(module)
