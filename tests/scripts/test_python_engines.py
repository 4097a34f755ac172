"""Engines of other projects answer in processes of their own; stand-ins for their packages answer here."""

import importlib
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from yggdrasil.errors import YggdrasilError

SCRIPTS = Path(__file__).parents[2] / "scripts"
IK_LLAMA = {  # a package whose model repeats the last token plus one, and prints as engines do
    "ik_llama_cpp/__init__.py": """
class Context:
    _n_ubatch = 2
    def kv_cache_clear(self): self.seen = []
    def decode(self, batch):
        self.seen += batch
        return int(batch[-1] == 13)
    def sample(self, index, *, temperature, top_k, top_p): return self.seen[-1] + 1
class IkLlama:
    def __init__(self, model, **options):
        print("loading", model)
        if model == "unreadable.gguf": raise ValueError("no such\\n architecture")
        self._context = Context()
    def __del__(self): self._context.__dict__.clear()
""",
    "ik_llama_cpp/_ctypes_api.py": "def llama_batch_free(batch): pass",
    "ik_llama_cpp/_internals.py": """
def make_batch_range(tokens, *, pos_start, logits_last): return tokens
def make_batch_single(token, position): return [token]
""",
    "ik_llama_cpp_python-0.1.5.dist-info/METADATA": "Name: ik-llama-cpp-python\nVersion: 0.1.5\n",
}


@pytest.fixture
def engines(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("python_engines")


@pytest.fixture
def opened(engines, monkeypatch, tmp_path):
    """Opens the engines that read a file, of stand-in packages and this process's Python."""
    for name, text in IK_LLAMA.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(engines, "install", lambda work, package, say: Path(sys.executable))
    said: list[str] = []
    with ExitStack() as running:

        def open_all(file="model.gguf", is_wanted=lambda name: name.startswith("ik")):
            return list(engines.python_engines(tmp_path, Path(file), 2, 64, is_wanted, running, said.append)), said

        yield open_all


def test_a_prompt_is_continued_by_exactly_the_tokens_wanted(opened):
    (ik_llama,), said = opened()
    answer = ik_llama.decode([5, 6, 7], 4)

    assert (ik_llama.name, ik_llama.family, ik_llama.is_plain) == ("ik_llama.cpp, plain", "ik_llama.cpp", True)
    assert (answer.tokens, answer.decoded, answer.passes) == ([8, 9, 10, 11], 3, 3)
    assert answer.ttft_ms > 0
    assert answer.tpot_ms > 0
    assert ik_llama.decode([1], 1).tokens == [2]
    assert ik_llama.version == "ik-llama-cpp-python 0.1.5"
    assert said == []


def test_a_file_that_an_engine_does_not_read_is_left_out_with_its_message(opened):
    assert opened("unreadable.gguf") == ([], ["left out: ik_llama.cpp, plain: no such architecture"])


def test_an_engine_whose_package_is_missing_is_left_out(opened):
    found, said = opened(is_wanted=lambda name: name == "OpenVINO GenAI, plain")

    assert found == []
    assert said[0].startswith("left out: OpenVINO GenAI, plain: No module named")


def test_an_engine_that_stops_is_named_with_its_last_line(opened):
    (ik_llama,), _ = opened()

    with pytest.raises(YggdrasilError, match=r"^ik_llama.cpp, plain stopped: RuntimeError: llama_decode returned 1$"):
        ik_llama.decode([12], 4)
    with pytest.raises(YggdrasilError, match="stopped"):
        ik_llama.decode([5], 4)


def test_passes_with_drafts_are_not_known(engines, tmp_path):
    worker = tmp_path / "worker.py"
    answers = [{"version": "1"}, {"tokens": [1, 2, 3], "first_ms": 5.0, "rest_ms": 8.0}, {"tokens": [1]}]
    worker.write_text(f"for line in {[json.dumps(one) for one in answers]}: print(line, flush=True); input()\n")
    engine = engines.ENGINES[1]
    with engines.EngineProcess(engine, [sys.executable, str(worker)], tmp_path / "log") as process:
        found = process.decode([1], 3)
        assert (process.is_plain, found.passes, found.ttft_ms, found.tpot_ms) == (False, 0, 5.0, 4.0)
        with pytest.raises(YggdrasilError, match=r"^OpenVINO GenAI, prompt look-up gave 1 of 3 tokens$"):
            process.decode([1], 3)


def test_a_package_is_installed_once_and_a_failure_is_a_sentence(engines, monkeypatch, tmp_path):
    created: list[Path] = []

    def create(folder, *, with_pip):
        python = folder / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f"#!/bin/sh\n{'echo no such version >&2; exit 1' if not created else 'exit 0'}\n")
        python.chmod(0o755)
        created.append(folder)

    monkeypatch.setattr(engines.venv, "create", create)
    with pytest.raises(YggdrasilError, match=r"^an-engine==1 cannot be installed: no such version$"):
        engines.install(tmp_path, "an-engine==1", str)
    for _ in range(2):
        assert engines.install(tmp_path, "an-engine==1", str) == tmp_path / "an-engine-1" / "bin" / "python"
    assert created == [tmp_path / "an-engine-1"] * 2
