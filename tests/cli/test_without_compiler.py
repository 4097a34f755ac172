"""An installed package decodes where there is no C++ compiler: its libraries are the only ones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import yggdrasil
from yggdrasil.library.build import Native
from yggdrasil.native import is_native

TARGET = Path(yggdrasil.__file__).parent / "assets" / "tiny" / "target"
COMMAND = "import sys; from yggdrasil.cli import main; sys.argv[0] = 'yggdrasil'; main()"


@pytest.mark.skipif(not is_native(), reason="the native library is not there")
def test_decoding_compiles_nothing(tmp_path):
    assert Native.library is not None
    environment = {
        "YGGDRASIL_LIBRARIES": str(Path(Native.library._name).parent), "YGGDRASIL_CACHE": str(tmp_path / "cache"),
        "CXX": "/bin/false", "PATH": str(tmp_path), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    target = shutil.copytree(TARGET, tmp_path / "target")
    command = [sys.executable, "-c", COMMAND, "generate", str(target), "--prompt", "def f(x):", "--max-new-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "portable" not in done.stderr
    assert not (tmp_path / "cache" / "kernels").exists()
