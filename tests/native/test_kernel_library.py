"""The library of native kernels is used whole or not at all: the portable ones give the same tokens."""

import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from yggdrasil.errors import ArtifactError
from yggdrasil.library import build, compiling, levels

ROOT = Path(__file__).parents[2]


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "ops.so"
    path.write_bytes(b"code" * 1000)
    (tmp_path / "ops.sha256").write_bytes(compiling.digest_of(path))
    return path


def test_a_library_counts_with_its_digest_beside_it(library, capsys):
    assert build._is_whole(library)

    library.with_suffix(".sha256").unlink()

    assert not build._is_whole(library)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda data: b""])
def test_a_damaged_library_is_named_and_not_loaded(library, damage, capsys):
    library.write_bytes(damage(library.read_bytes()))

    assert not build._is_whole(library)
    assert f"{library} is damaged and is compiled again" in capsys.readouterr().err


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """A cache of its own, a compiler that is at once done, and the libraries that each thread opens."""
    opened = []
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "a compiler")
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "nothing")
    monkeypatch.setattr(build, "compile_library", lambda _, level, output, folder: output.write_bytes(b"library"))
    monkeypatch.setattr(build, "_open", lambda library, level: opened.append((threading.get_ident(), library)))
    return opened


def test_of_two_first_starts_one_compiles_and_each_opens_one_library(opened, monkeypatch, capsys):
    first, waits, compiles = [], threading.Event(), build.compile_library
    second = threading.Thread(target=build.load_native)

    def compile_late(*arguments):
        if not first:
            first.append(arguments)
            second.start()
            assert waits.wait(60)
        compiles(*arguments)

    monkeypatch.setattr(build, "compile_library", compile_late)
    monkeypatch.setattr(build, "tell", lambda sentence: waits.set())
    assert build.load_native()
    second.join()

    assert capsys.readouterr().err.count("compiling the CPU kernels") == 1
    assert len(opened) == len({thread for thread, _ in opened}) == 2


def test_a_library_that_is_there_needs_no_lock(opened, monkeypatch):
    """The cache may be one that cannot be written."""
    assert build.load_native()
    monkeypatch.setattr(build, "locked", lambda *_, **__: pytest.fail("the lock was taken"))
    opened.clear()

    assert build.load_native()
    assert [library.parent.name for _, library in opened] == ["kernels"]


def test_a_library_that_cannot_be_kept_is_used_all_the_same(opened, monkeypatch, capsys):
    """It is loaded: the portable kernels cannot take its operators' places any more."""

    def full(path, _):
        raise ArtifactError(f"cannot write {path}")

    monkeypatch.setattr(build, "write_atomic", full)

    assert build.load_native()
    assert "could not be kept, the next start compiles them again: cannot write" in capsys.readouterr().err


def test_where_no_lock_can_be_made_the_portable_kernels_take_their_place(tmp_path, monkeypatch, opened, capsys):
    (tmp_path / "kernels").touch()

    assert not build.load_native()
    assert "PyTorch's operators take their place" in capsys.readouterr().err
    assert not opened


def compiler_that_runs(script, folder):
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return compiler


@pytest.mark.parametrize("script", ["exit 1", "kill -9 $$", "exit 0"])
def test_a_compiler_that_fails_or_writes_nothing_makes_no_library(tmp_path, monkeypatch, capsys, script):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler_that_runs(script, tmp_path)))
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "nothing")

    assert not build.load_native()
    assert "PyTorch's operators take their place" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_library_that_cannot_be_loaded_leaves_the_portable_kernels(tmp_path):
    compiler = compiler_that_runs('for last; do :; done; head -c 1000 /dev/urandom > "$last"', tmp_path)
    code = "from yggdrasil.native import is_native; print(is_native())"
    environment = {
        "YGGDRASIL_CACHE": str(tmp_path / "cache"), "YGGDRASIL_LIBRARIES": str(tmp_path), "CXX": str(compiler),
        "PATH": "/usr/bin:/bin",
    }  # fmt: skip

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )

    assert done.stdout.strip() == "False"
    assert "PyTorch's operators take their place" in done.stderr
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_sources_that_changed_make_another_library(opened, tmp_path, monkeypatch):
    assert build.load_native()
    shutil.copytree(compiling.SOURCES, tmp_path / "sources", ignore=shutil.ignore_patterns("lib"))
    monkeypatch.setattr(compiling, "SOURCES", tmp_path / "sources")
    with (tmp_path / "sources" / "common" / "simd.h").open("a") as header:
        header.write("// changed\n")

    assert build.load_native()
    assert len({library.name for _, library in opened}) == 2


def test_without_a_compiler_a_lower_level_of_the_package_is_loaded(opened, tmp_path, monkeypatch, capsys):
    best, *lower = levels.supported_levels()[::-1]
    if not lower:
        pytest.skip("there is no lower level here")
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert not build.load_native()
    library = tmp_path / "installed" / compiling.library_name(lower[0])
    library.parent.mkdir()
    library.write_bytes(b"library")
    compiling.digest_file(library).write_bytes(compiling.digest_of(library))

    assert build.load_native()
    assert [path for _, path in opened] == [library]
    said = capsys.readouterr().err
    assert f"for {best.name} cannot be compiled (there is no C++ compiler), those for {lower[0].name}" in said


def test_a_level_is_selected_by_the_environment(monkeypatch):
    lowest = levels.supported_levels()[0]
    monkeypatch.setenv(levels.VARIABLE, lowest.name)
    assert levels.chosen_levels() == (lowest,)
    monkeypatch.setenv(levels.VARIABLE, levels.NONE)
    assert levels.chosen_levels() == ()


def test_a_level_that_is_not_here_is_refused_by_name(opened, monkeypatch, capsys):
    monkeypatch.setenv(levels.VARIABLE, "mmx")

    assert not build.load_native()
    assert "YGGDRASIL_CPU_LEVEL=mmx names no level of this processor; it has plain" in capsys.readouterr().err


_ABSENT = [level for level in levels.all_levels() if level not in levels.supported_levels()]
_ABSENT = [*(pytest.param(level, marks=pytest.mark.slow) for level in _ABSENT[:-1]), *_ABSENT[-1:]]
HAS_GCC = shutil.which("g++") is not None and platform.machine() == "x86_64"


@pytest.mark.skipif(not HAS_GCC, reason="compiles for x86 processors with g++")
@pytest.mark.parametrize("level", _ABSENT, ids=lambda level: level.name)
def test_the_kernels_compile_for_processors_that_are_not_here(level):
    """With ``--all`` for every level; else for the highest, which has the paths of most."""
    compiling.run_all(
        ["g++", *compiling._FLAGS, *level.flags, f"-I{compiling.SOURCES}", "-fsyntax-only", str(source)]
        for source in (compiling.SOURCES / f"{unit}.cpp" for unit in compiling._UNITS)
    )


_LOWER = [level.name for level in levels.supported_levels()[:-1]]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GCC, reason="compiles for levels below this processor's with g++")
@pytest.mark.parametrize("level", _LOWER)
def test_the_kernels_pass_their_tests_on_lower_levels(level):
    """Other paths are compiled than where tests usually run; the library is kept in the user's cache."""
    environment = {**os.environ, levels.VARIABLE: level}
    files = ["tests/checkpoints/test_formats.py", "tests/native/test_kernels.py"]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout
    assert "portable" not in done.stderr
