"""What is built carries a library for each level of instructions, and is built without a compiler too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from yggdrasil.library import compiling, levels

ROOT = Path(__file__).parents[2]
_COMPILER = '#!/bin/sh\nfor last; do :; done\necho "$*" > "$last"\n'  # a library is the command that made it


def build(folder, compiler):
    pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml requires
    environment = {**os.environ, "CXX": str(compiler)} if compiler else {"PATH": "/nowhere"}
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(folder), "--build-lib", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    return folder / "yggdrasil" / "native" / "lib", done.stdout + done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no libraries are built there")
def test_a_package_carries_a_library_for_each_level(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(_COMPILER)
    compiler.chmod(0o755)

    folder, _ = build(tmp_path / "build", compiler)

    for level in levels.all_levels():
        library = folder / compiling.library_name(level)
        assert compiling.digest_file(library).read_bytes() == compiling.digest_of(library)
    assert len(list(folder.iterdir())) == 2 * len(levels.all_levels())


@pytest.mark.skipif(sys.platform == "win32", reason="no libraries are built there")
def test_a_second_installation_compiles_nothing_but_what_is_damaged(tmp_path):
    """README's `pip install` and then `scripts/demo`: minutes of compiling, twice."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'{_COMPILER}echo again >> "{tmp_path}/calls"\n')
    compiler.chmod(0o755)
    level = levels.all_levels()[0]

    library = compiling.install_library(str(compiler), level, tmp_path / "lib")
    first = (tmp_path / "calls").read_text()
    compiling.install_library(str(compiler), level, tmp_path / "lib")
    assert (tmp_path / "calls").read_text() == first
    library.write_text("damaged")
    compiling.install_library(str(compiler), level, tmp_path / "lib")
    assert (tmp_path / "calls").read_text() == 2 * first
    assert compiling.digest_file(library).read_bytes() == compiling.digest_of(library)


def test_without_a_compiler_a_package_is_built_and_says_so(tmp_path):
    folder, said = build(tmp_path / "build", None)

    assert not folder.exists()
    assert "no C++ compiler was found" in said
    assert (folder.parent / "calls.py").exists()
