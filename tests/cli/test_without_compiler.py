"""An installed package decodes where there is no C++ compiler: its libraries are the only ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from head_files import eagle_config, published_tensors, write_head

import yggdrasil
from yggdrasil.library.build import Native
from yggdrasil.native import is_native

TARGET = Path(yggdrasil.__file__).parent / "assets" / "tiny" / "target"
COMMAND = "import sys; from yggdrasil.cli import main; sys.argv[0] = 'yggdrasil'; main()"


pytestmark = pytest.mark.skipif(not is_native(), reason="the native library is not there")


@pytest.fixture
def generate(tmp_path):
    """Run the command on a copy of the bundled target, with ``options``."""
    assert Native.library is not None
    environment = {
        "YGGDRASIL_LIBRARIES": str(Path(Native.library._name).parent), "YGGDRASIL_CACHE": str(tmp_path / "cache"),
        "CXX": "/bin/false", "PATH": str(tmp_path), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    target = shutil.copytree(TARGET, tmp_path / "target")

    def run(*options):
        command = [sys.executable, "-c", COMMAND, "generate", target, "--prompt", "def f(x):", "--max-new-tokens", "4"]
        return subprocess.run(
            [*command, *options], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )

    return run


def test_decoding_compiles_nothing(generate, tmp_path):
    done = generate()

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "PyTorch's operators" not in done.stderr
    assert not (tmp_path / "cache" / "kernels").exists()


def test_a_head_is_tried_at_a_first_use(generate, tmp_path):
    """By a command, which imports only a part of PyTorch; a head of random weights predicts nothing."""
    sizes = json.loads((TARGET / "config.json").read_text())
    config = eagle_config(sizes["vocab_size"], sizes["vocab_size"], hidden_size=sizes["hidden_size"])
    done = generate("--drafter", write_head(tmp_path / "head", config, published_tensors(config)))

    assert done.returncode == 2
    assert "head hardly predicts the target's tokens" in done.stderr
    assert "Traceback" not in done.stderr
