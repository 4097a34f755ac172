"""The library of native kernels is used whole or not at all: the portable ones give the same tokens."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from yggdrasil.errors import ArtifactError
from yggdrasil.native import build

ROOT = Path(__file__).parents[2]


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "ops.so"
    path.write_bytes(b"code" * 1000)
    (tmp_path / "ops.sha256").write_bytes(build._digest(path))
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
    opened = set()
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_run_all", lambda commands: Path(commands[-1][-1]).write_bytes(b"library"))

    def note(name, mode=0):
        opened.add((threading.get_ident(), Path(name)))

    monkeypatch.setattr(torch.ops, "load_library", note)
    monkeypatch.setattr(ctypes, "CDLL", note)
    return opened


def test_of_two_first_starts_one_compiles_and_each_opens_one_library(opened, monkeypatch, capsys):
    """Another copy of it would register all operators again."""
    first, waits, compiles = [], threading.Event(), build._run_all
    second = threading.Thread(target=build.load_native)

    def compile_late(commands):
        if not first:
            first.append(commands)
            second.start()
            assert waits.wait(60)
        compiles(commands)

    monkeypatch.setattr(build, "_run_all", compile_late)
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
    assert "the slower portable ones take their place" in capsys.readouterr().err
    assert not opened


@pytest.mark.parametrize(
    "script", ["exit 1", "kill -9 $$", "exit 0", 'for last; do :; done; head -c 1000 /dev/urandom > "$last"']
)
def test_a_compiler_that_does_not_do_its_work_leaves_the_portable_kernels(tmp_path, script):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    code = "from yggdrasil.native import is_native; print(is_native())"
    environment = {"YGGDRASIL_CACHE": str(tmp_path / "cache"), "CXX": str(compiler), "PATH": "/usr/bin:/bin"}

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )

    assert done.stdout.strip() == "False"
    assert "the slower portable ones take their place" in done.stderr
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="compiles for x86 processors with g++"
)
@pytest.mark.parametrize(
    "processor",
    [
        pytest.param(
            "sapphirerapids",
            marks=pytest.mark.skipif(
                {"amx_tile", "amx_int8", "amx_bf16", "avx512_vnni"} <= set(build._cpu_features().split()),
                reason="all tests run on these here",
            ),
        ),
        "skylake-avx512",
        pytest.param(
            "alderlake",
            marks=pytest.mark.skipif(" avx_vnni " in build._cpu_features(), reason="compiled, and run, below"),
        ),
    ],
)
def test_the_kernels_compile_for_processors_that_are_not_here(processor):
    """With the matrix unit; with vectors of 512 bits, and neither VNNI nor bfloat16; of 256 bits, and VNNI."""
    others = [flag for flag in build._FLAGS if not flag.startswith("-march")]
    build._run_all([
        ["g++", *others, *build._of_torch(), f"-march={processor}", "-fsyntax-only", str(source)]
        for source in build._SOURCES
    ])  # fmt: skip


@pytest.mark.compiled
@pytest.mark.skipif(
    shutil.which("g++") is None or " avx2 " not in build._cpu_features(), reason="runs kernels for avx2 and less"
)
@pytest.mark.parametrize(
    "processor",
    [
        pytest.param(
            "x86-64-v3",
            marks=pytest.mark.skipif(" avx512f " not in build._cpu_features(), reason="all tests run on these here"),
        ),
        pytest.param(
            "x86-64-v3 -mavxvnni",
            marks=pytest.mark.skipif(" avx_vnni " not in build._cpu_features(), reason="multiplies bytes by AVX-VNNI"),
        ),
        pytest.param(
            "x86-64-v3 -mavx512vl -mavx512vnni",  # the same kernels, by the instruction as server processors have it
            marks=pytest.mark.skipif(
                " avx_vnni " in build._cpu_features() or " avx512_vnni " not in build._cpu_features(),
                reason="stands in for AVX-VNNI where there is none",
            ),
        ),
        "x86-64-v2",
    ],
)
def test_the_kernels_pass_their_tests_on_lesser_processors(tmp_path, processor):
    """Vectors of 256 bits, with and without VNNI, and none: other paths are compiled than where tests usually run."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" -march={processor}\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "YGGDRASIL_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    files = [f"tests/models/test_{name}.py" for name in ("formats", "kernels")]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout
    assert list((tmp_path / "cache").rglob("*.so")), done.stderr
