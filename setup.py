"""Compile the CPU operators' libraries while the package is built; all else stands in pyproject.toml.

A wheel gets a library for each level of instructions that the compiler knows, and needs no compiler where it is
installed. An editable install gets the library of this processor. Without a compiler the package is built all the same:
the portable operators serve then, and a wheel is of no platform.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

LIBRARY, NATIVE = Path("yggdrasil", "library"), Path("yggdrasil", "native")


def _load(name: str) -> ModuleType:
    """A module of the package that needs nothing else: its dependencies are not here while it is built."""
    spec = importlib.util.spec_from_file_location(f"_yggdrasil_{name}", Path(__file__).parent / LIBRARY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


compiling, levels = _load("compiling"), _load("levels")


def _say(sentence: str) -> None:
    print(f"yggdrasil: {sentence}", file=sys.stderr)  # noqa: T201  (pip shows it where it is asked to be verbose)


class BuildNative(Command):
    """Compile the libraries into ``native/lib``: of the package to be, or of the checkout for an editable install."""

    description = "compile the CPU operators"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.made: list[str] = []

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        compiler = compiling.find_compiler()
        if compiler is None or sys.platform == "win32":
            _say("no C++ compiler was found: the slower portable CPU kernels are used")
            return
        assert self.build_lib is not None
        root = Path(__file__).parent if self.editable_mode else Path(self.build_lib)
        folder = root / NATIVE / "lib"
        for level in levels.supported_levels()[-1:] if self.editable_mode else levels.all_levels():
            try:
                library = compiling.install_library(compiler, level, folder)
            except OSError as error:
                _say(f"there is no library for {level.name}: {error}")
                continue
            self.made += [str(library), str(compiling.digest_file(library))]

    def get_source_files(self) -> list[str]:
        return [str(path) for path in sorted(NATIVE.rglob("*")) if path.suffix in (".cpp", ".h")]

    def get_outputs(self) -> list[str]:
        return self.made

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PackageWithLibraries(Distribution):
    """Of this platform where there is a compiler."""

    def has_ext_modules(self) -> bool:
        return compiling.find_compiler() is not None


class Wheel(bdist_wheel):
    """The libraries need no particular Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


build.sub_commands.append(("build_native", None))
setup(distclass=PackageWithLibraries, cmdclass={"build_native": BuildNative, "bdist_wheel": Wheel})
