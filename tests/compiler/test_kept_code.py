"""Compiled code that a process keeps for those after it: a second start compiles nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from yggdrasil.compiler import in_process

TESTS = Path(__file__).resolve().parents[1]
# A start as on a GPU: kept code is loaded before the first compilation, and written after the last.
PROGRAM = """
import json
import torch
from torch._dynamo.utils import counters
from tiny_pair import TEXT, make_pair
from yggdrasil.compiler.in_process import compile_by_inductor, compiling_by, load_kept_code
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.scheduling.plan import Shapes

torch.set_num_threads(1)
SHAPES = Shapes(max_length=60, draft_widths=(1,), max_depth=1, candidates=2, verify_widths=(1,), prefill_widths=(1,))

def compile_as_on_a_gpu(graph, inputs):
    load_kept_code()
    return compile_by_inductor(graph, inputs)

pair = make_pair()
with compiling_by(compile_as_on_a_gpu):
    decoder = pair.decoder(PLAIN_POLICY, SHAPES, backend="cudagraph", drafter=None)
    decoder.assembly.complete()
tokens = decoder.generate(TEXT[:9], max_new_tokens=12).tokens
assert all(step.is_compiled for step in decoder.assembly.target._steps.values())
assert tokens == pair.reference(TEXT[:9], 12)
found = counters["inductor"]
print(json.dumps([found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]]))
"""


def start(cache, inductor):
    """Numbers of graphs compiled and of graphs loaded by a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "YGGDRASIL_CACHE": str(cache)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(inductor)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.compiled
@pytest.mark.slow
def test_a_second_start_compiles_nothing(compile_cache, tmp_path):
    """Nor where TorchInductor's own folder, which may be a temporary one, has lost its graphs since."""
    num_compiled, num_loaded = start(compile_cache, tmp_path)
    assert (num_compiled >= 3, num_loaded) == (True, 0)  # two steps, and the layer that both call
    for name in ("fxgraph", "aotautograd"):
        shutil.rmtree(tmp_path / name)

    assert start(compile_cache, tmp_path) == [0, num_compiled]
    assert len(list((compile_cache / "captures").rglob("*.bin"))) == 1  # the second start has added nothing


def test_code_is_kept_by_card_and_versions(monkeypatch):
    folders = {in_process.kept_code_folder()}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for card in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda card=card: card)
        folders.add(in_process.kept_code_folder())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    folders.add(in_process.kept_code_folder())

    assert len(folders) == 4


def test_a_damaged_file_is_deleted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(in_process, "kept_code_folder", lambda: tmp_path)
    damaged = tmp_path / "half.bin"
    damaged.write_bytes(b"cut off")
    in_process.load_kept_code.cache_clear()
    try:
        assert in_process.load_kept_code() == 0
    finally:
        in_process.load_kept_code.cache_clear()

    assert not damaged.exists()
    assert "half.bin cannot be read and is compiled again" in capsys.readouterr().err
