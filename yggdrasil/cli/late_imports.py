"""Shortens the import of PyTorch: modules that only its compiler and quantisation need are executed when used.

Executing these modules takes more than half of the time of ``import torch``. Here they are placeholders, which are
executed when a name of theirs is first read. Some of them only register something, such as shape functions. So all are
executed before a module is imported that may need such registrations.
"""

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

# Not executed by ``import torch``. The order of all other imports stays PyTorch's own: its modules import each other.
_LATE = frozenset((
    "torch._meta_registrations", "torch.ao", "torch.distributions", "torch.masked", "torch.nn.intrinsic",
    "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torch.quantization",
))  # fmt: skip
_LATER = _LATE | {
    "torch.distributed._meta_registrations", "torch.export", "torch.nested", "torch.optim", "torch.profiler",
    "torch.utils.data", "torchgen.model", "unittest.mock",
}  # fmt: skip
_INSTEAD = {"torch.nested": "torch.fx"}  # executed in the place of a late module, which imports it first
_NEEDING = frozenset(("torch._dynamo", "torch._inductor", "torch.export._trace", "transformers"))


def import_late() -> None:
    """Make ``import torch`` faster: modules that only its compiler and quantisation need are executed when used.

    Call this before PyTorch is imported. It does nothing with versions of PyTorch with which it was not tested.
    """
    spec = PathFinder.find_spec("torch")
    version = "" if spec is None or spec.origin is None else _version(Path(spec.origin).parent)
    finder = next((finder for tested, finder in _TESTED.items() if version.startswith(tested)), None)
    if finder is not None:
        sys.meta_path.insert(0, finder())


def _version(package: Path) -> str:
    """Return the version of the PyTorch in ``package`` without importing it; empty if version.py does not have it."""
    try:
        found = re.search(r"^__version__ = '(.*)'$", (package / "version.py").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


class _Finder(MetaPathFinder):
    """Finder that gives the modules ``late`` a placeholder, and replaces names of the modules in ``replaced``."""

    def __init__(self, late: frozenset[str], replaced: Mapping[str, Mapping[str, Any]]) -> None:
        self._late, self._replaced = late, replaced
        self._found: list[ModuleType] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _NEEDING:
            sys.meta_path.remove(self)
            for module in self._found:
                _execute(module)
        package = sys.modules.get(name.rpartition(".")[0])
        if package in self._found and _execute(package) and name in sys.modules:
            return _spec_of(sys.modules[name])
        is_late = name in self._late
        spec = PathFinder.find_spec(name, path) if is_late or name in self._replaced else None
        if spec is not None and spec.loader is not None:
            if is_late and name in _INSTEAD:
                import_module(_INSTEAD[name])
            if name == "torch._meta_registrations":
                _allow_generators()
            loader = spec.loader
            spec.loader = _Placeholder(loader, self._found) if is_late else _Replacing(loader, self._replaced[name])
        return spec


def _allow_generators() -> None:
    """Set the metaclass of ``torch.Generator``, without which no generator can be created.

    In PyTorch's own import, a module does this that only late modules import.
    """
    set_metaclass = getattr(sys.modules["torch._C"], "_set_generator_metaclass", None)  # since PyTorch 2.13
    if set_metaclass is not None:
        set_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


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


def _execute(module: ModuleType) -> bool:
    """Execute the code of a placeholder that was not executed before; return whether this call executed it."""
    loader = module.__dict__.pop(_PENDING, None)
    if loader is not None:
        del module.__dict__["__getattr__"]
        loader.exec_module(module)
    return loader is not None


class _Existing(Loader):
    """Loader of a module that its package has imported while the import system looked for it."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _spec_of(module: ModuleType) -> ModuleSpec:
    """Return a spec with which the import system uses ``module`` itself instead of executing it again."""
    spec = ModuleSpec(module.__name__, _Existing(module))
    module.__spec__ = spec  # preferred by the import system to what a finder returns
    return spec


class _Replacing(Loader):
    """Loader that executes a module and then replaces some of its names."""

    def __init__(self, loader: Loader, names: Mapping[str, Any]) -> None:
        self._loader, self._names = loader, names

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__dict__.update(self._names)


def _source(stacklevel: int) -> str:
    """Return file and line of a caller, as PyTorch's ``get_source`` does, but without reading the file."""
    frame = inspect.getframeinfo(sys._getframe(stacklevel), context=0)
    return f"{frame.filename}:{frame.lineno}"


def _module_of(frame: FrameType) -> ModuleType | None:
    """Return the module whose code ``frame`` executes. Unlike ``inspect.getmodule`` this does not search all
    modules."""
    return sys.modules.get(frame.f_globals.get("__name__", ""))


# Every registration of a shape function calls these, and ``torch.library`` uses nothing else of ``inspect``.
_REPLACED: Mapping[str, Mapping[str, Any]] = {
    "torch._library.utils": {"get_source": _source},
    "torch.library": {"inspect": SimpleNamespace(getmodule=_module_of)},
}
# PyTorch's modules import each other, and the order differs by version.
_TESTED = {"2.12.": partial(_Finder, _LATE, {}), "2.13.": partial(_Finder, _LATER, _REPLACED)}
