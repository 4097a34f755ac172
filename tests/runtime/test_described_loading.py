"""A covered model is packed from its file as it lies: the tensors that the general loader packs, and no model made."""

import subprocess
import sys

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import NAMES, tiny_model, write_gguf
from safetensors.torch import load_file, save_file
from test_native_steps import COVERED, new_model

from yggdrasil.artifacts.cache import cache_root
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.runtime.kept_tensors import open_model
from yggdrasil.runtime.loading import load_model
from yggdrasil.runtime.native_steps.loading import load_described
from yggdrasil.runtime.runner import ModelRunner

pytestmark = pytest.mark.skipif(not is_native(), reason="the native library is not there")
CPU = torch.device("cpu")
TEXT = torch.tensor([5, 7, 11, 13, 17, 19, 23])


def described(path, dtype=torch.float32, weights="full"):
    loaded = load_described(Source.find(path), dtype, 1, weights, lambda: pytest.fail("a model was made"))
    assert loaded is not None
    return loaded


def logits_of(loaded):
    runner = ModelRunner(loaded, 32, loaded.vocab_size, "native")
    assert runner.backend == "native"
    mask = torch.ones(len(TEXT), len(TEXT), dtype=torch.bool).tril()
    places, offsets = torch.arange(len(TEXT)), torch.zeros(2, dtype=torch.int64)
    return runner.call(runner.weights, runner.cache.tensors(), TEXT, places, mask, offsets).logits


def assert_alike(ours, theirs):
    """The same tensors, but for buffers that every start computes anew and embeddings that stay blocks."""
    for name, tensor in ours.tensors.items():
        if name in theirs.tensors:
            assert torch.equal(tensor, theirs.tensors[name]), name
    left = {name for name in theirs.tensors.keys() - ours.tensors.keys() if "inv_freq" not in name}
    assert left <= {"model.embed_tokens.embed_scale", "model.embed_tokens.weight", "lm_head.packed"}
    assert ours.sizes == theirs.sizes
    assert torch.equal(logits_of(ours), logits_of(theirs))


@pytest.mark.parametrize("family", [*COVERED, "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_folder_is_packed_as_the_general_loader_packs_it(tmp_path, family, dtype):
    model = new_model(family) if family == "lfm2" else tiny_model(family)
    model.to(dtype).save_pretrained(tmp_path)

    assert_alike(described(tmp_path, dtype), load_model(tmp_path, dtype, CPU, 1))


@pytest.mark.parametrize("weights", ["full", "file"])
@pytest.mark.parametrize("family", [family for family in NAMES if family in COVERED])
def test_a_file_is_packed_as_the_general_loader_packs_it(tmp_path, family, weights):
    file = write_gguf(tmp_path / "model.gguf", tiny_model(family), family, Kind.Q8_0)

    assert_alike(described(file, torch.bfloat16, weights), load_model(file, torch.bfloat16, CPU, 1, weights=weights))


def test_a_head_beside_the_embedding_counts_where_both_are_said_to_be_one(tmp_path):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tied = logits_of(described(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    save_file(weights | {"lm_head.weight": 2 * weights["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")

    assert torch.equal(logits_of(described(tmp_path)), 2 * tied)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
        (lambda weights: weights.update({"model.more": torch.zeros(2)}), "beyond what the model has, model.more"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}), r"misshapen model.norm.weight \(\[3\]"),
    ],
    ids=["missing", "more", "misshapen"],
)
def test_a_folder_of_other_weights_is_refused(tmp_path, change, said):
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")

    with pytest.raises(YggdrasilError, match=said):
        described(tmp_path)


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path):
    model = tiny_model("qwen2")
    file = write_gguf(tmp_path / "model.gguf", model, "qwen2", leave_out=["blk.1.attn_k.bias"])

    with pytest.raises(YggdrasilError, match=r"lacks blk\.1\.attn_k\.bias"):
        described(file)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_families_are_left_to_the_general_loader(tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path)

    assert load_described(Source.find(tmp_path), torch.float32, 1, "full", lambda: None) is None


def test_opening_keeps_no_copy_on_disk_and_imports_no_model_code(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), kind=Kind.Q4_1)
    kernels = cache_root() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(kernels)  # else they are compiled again
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    open_model(file, torch.bfloat16, CPU, 1, weights="file")  # prepares what the file says
    code = (
        "import sys, torch\n"
        "from yggdrasil.runtime.kept_tensors import open_model\n"
        "from yggdrasil.runtime.runner import ModelRunner\n"
        f"loaded = open_model({str(file)!r}, torch.bfloat16, torch.device('cpu'), 1, weights='file')\n"
        "assert ModelRunner(loaded, 32, loaded.vocab_size, 'native').backend == 'native'\n"
        "print([name for name in sys.modules if name.startswith(('transformers', 'torch._dynamo'))])\n"
    )

    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert said.strip() == "[]"
    kept = {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert ".safetensors" not in kept
