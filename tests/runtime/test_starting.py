"""A later start imports no more than decoding needs, and loading holds a file's pages no longer than it reads them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny_model, write_gguf
from transformers import LlamaConfig, MambaConfig

import yggdrasil
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.gguf import read_gguf_header
from yggdrasil.checkpoints.gguf import packing
from yggdrasil.checkpoints.gguf.mapped import MappedGguf
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.runtime.native_steps import loading
from yggdrasil.runtime.native_steps.loading import load_described, refuse_uncovered

BUNDLED = Path(yggdrasil.__file__).parent / "assets" / "tiny"
native_only = pytest.mark.skipif(not is_native(), reason="the native library is not there")
# What only calibrating, training, reporting, serving, compiling, or a first start needs.
HEAVY = (
    "transformers", "torch._dynamo", "torch._inductor", "torch.onnx", "accelerate", "huggingface_hub", "gguf",
    "sklearn", "scipy", "pandas", "safetensors.torch", "fastapi", "pydantic", "numpy.random",
)  # fmt: skip
PROGRAM = """
import sys
from yggdrasil.pretrained import Decoder

if "first" in sys.argv:
    from yggdrasil.calibration import first_use

    first_use.SECONDS = 0.001
answer = Decoder.from_pretrained({target!r}, drafter={drafter!r}).generate("def f(x):", max_new_tokens=8)
assert len(answer.tokens) == 8
print(sorted(name for name in {heavy!r} if name in sys.modules))
"""


@native_only
def test_a_later_start_imports_no_more_than_decoding_needs(tmp_path):
    (tmp_path / "kernels").symlink_to(cache_root() / "kernels")
    program = PROGRAM.format(target=str(BUNDLED / "target"), drafter=str(BUNDLED / "drafter"), heavy=HEAVY)
    environment = {**os.environ, "YGGDRASIL_CACHE": str(tmp_path)}
    for start in ("first", "second"):
        done = subprocess.run(
            [sys.executable, "-c", program, start], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr

    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def resident_bytes(file):
    """How much of ``file`` this process holds, as mapped pages."""
    found, is_its = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            is_its = line.endswith(str(file))
        elif is_its and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@native_only
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")
def test_packing_holds_one_weight_of_the_file_and_one_copy_of_all(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "Arena", CountingArena)
    regions, new_region = [], packing.new_region
    monkeypatch.setattr(packing, "new_region", lambda size: regions.append(size) or new_region(size))
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    file = write_gguf(tmp_path / "model.gguf", model, kind=Kind.Q8_0)
    held, add = [], loading._Packer.add

    def watched(packer, name, **kind):
        add(packer, name, **kind)
        held.append(resident_bytes(file))

    monkeypatch.setattr(loading._Packer, "add", watched)
    loaded = load_described(Source.find(file), torch.bfloat16, 1, "file", lambda: None)

    assert loaded is not None
    assert max(held) <= 4 * os.sysconf("SC_PAGE_SIZE") * len(held), "edges of weights share pages with others"
    assert max(held) < file.stat().st_size / 4
    num_bytes = CountingArena.num_bytes + sum(regions)
    assert num_bytes <= 1.15 * file.stat().st_size
    assert 0.99 * num_bytes <= sum(tensor.nbytes for tensor in loaded.tensors.values()) <= num_bytes


@native_only
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")
def test_what_the_system_maps_around_a_small_weight_is_dropped_too(tmp_path):
    """It maps 64 KiB for a page, which some hundred norms and edges of matrices would add up to tens of megabytes."""
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), kind=Kind.Q8_0)
    header = read_gguf_header(file)
    packer = packing.GgufPacker(header, (4, 2))
    middle = header.tensors["blk.1.attn_k.weight"]
    assert max(middle.start, file.stat().st_size - middle.start - middle.num_bytes) < 64 << 10
    assert packer.data[header.data_start] is not None
    assert resident_bytes(file) > 4096

    packer.packed(middle)
    packer.release(middle.start, middle.num_bytes)  # as the loader does
    assert resident_bytes(file) == 0
    norm = header.tensors["output_norm.weight"]
    mapped = MappedGguf.__new__(MappedGguf)
    mapped._header, mapped._packer = header, packer
    assert mapped._bytes(norm).numpy().tobytes() == file.read_bytes()[norm.start : norm.start + norm.num_bytes]
    assert resident_bytes(file) == 0


class CountingArena(loading.Arena):
    """Counts what is handed out."""

    num_bytes = 0

    def zeros(self, shape, dtype):
        tensor = super().zeros(shape, dtype)
        CountingArena.num_bytes += tensor.nbytes
        return tensor


@native_only
@pytest.mark.parametrize("config", [MambaConfig(), LlamaConfig(hidden_act="relu")])
def test_native_steps_are_refused_by_the_configuration(tmp_path, config):
    config.save_pretrained(tmp_path)

    with pytest.raises(YggdrasilError, match="native steps do not cover its architecture; use --backend inductor"):
        refuse_uncovered(Source.find(tmp_path))
