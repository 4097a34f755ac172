"""K formats: which layer of a mix gets which, and that ggml, where it is, rounds what it is given."""

import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Q
from transformers import AutoModelForCausalLM, LlamaConfig

from yggdrasil.checkpoints.formats import ggml
from yggdrasil.checkpoints.formats.rounding import rounding_to
from yggdrasil.errors import YggdrasilError

# Blocks whose first byte is the format's number and whose last is the row's: what was asked for can be read off.
STAND_IN = """
#include <stdint.h>
#include <string.h>
size_t ggml_quantize_chunk(int form, const float* src, void* dst, int64_t start, int64_t rows, int64_t inputs,
                           const float* importance) {
  int64_t sizes[16] = {[8] = 34, [12] = 144, [13] = 176, [14] = 210, [6] = 22, [7] = 24};
  int64_t bytes = inputs / (form < 10 ? 32 : 256) * sizes[form];
  if (importance || start) return 0;
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t* out = (uint8_t*)dst + row * bytes;
    memset(out, 0, bytes);
    out[0] = form, out[bytes - 1] = (uint8_t)src[row * inputs];
  }
  return rows * bytes;
}
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package that brings a stand-in for ggml."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "lib").mkdir()
    (tmp_path / "ggml.c").write_text(STAND_IN)
    command = [compiler, "-shared", "-fPIC", "-o", tmp_path / "lib" / "libggml-base.so", tmp_path / "ggml.c"]
    subprocess.run(command, check=True)
    found(tmp_path, monkeypatch)
    yield tmp_path / "lib" / "libggml-base.so"
    ggml._quantize_chunk.cache_clear()


def found(package, monkeypatch):
    """Have the package be found in that folder."""
    ggml._quantize_chunk.cache_clear()
    monkeypatch.setattr(ggml, "find_spec", lambda _: SimpleNamespace(origin=str(package / "__init__.py")))


@pytest.mark.parametrize("form", [Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q5_0, Q.Q5_1])
def test_every_row_is_handed_over_with_its_format(library, form):
    weight = np.arange(3, dtype=np.float32)[:, None].repeat(512, axis=1)
    blocks = ggml.quantise_by_ggml(weight, form)

    inputs, size = GGML_QUANT_SIZES[form]
    assert blocks.shape == (3, 512 // inputs * size)
    assert blocks[:, 0].tolist() == [form] * 3
    assert blocks[:, -1].tolist() == [0, 1, 2]


def test_a_package_without_its_library_is_named(library, tmp_path, monkeypatch):
    library.write_bytes(b"no library")
    with pytest.raises(YggdrasilError, match=r"libggml-base\.so does not work .*install llama-cpp-python again"):
        ggml.quantise_by_ggml(np.zeros((1, 256), np.float32), Q.Q4_K)
    library.unlink()
    found(tmp_path, monkeypatch)
    assert not ggml.has_ggml()
    with pytest.raises(YggdrasilError, match="pip install llama-cpp-python"):
        ggml.quantise_by_ggml(np.zeros((1, 256), np.float32), Q.Q4_K)


@pytest.fixture(scope="module")
def model():
    """Eighteen layers, 256 and 288 inputs: the second are no whole blocks of 256. Embedding and head are apart."""
    config = LlamaConfig(
        vocab_size=40, hidden_size=256, intermediate_size=288, num_hidden_layers=18, num_attention_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


# Of 18 layers: the first eighth, the last, and every third of the others.
DEAR = (0, 1, 4, 7, 10, 13, 15, 16, 17)


@pytest.mark.parametrize(("weights", "base", "fallback"), [("q4_k_m", "Q4_K", "Q5_0"), ("q5_k_m", "Q5_K", "Q5_1")])
def test_a_mix_gives_more_bits_to_what_suffers_most(library, model, weights, base, fallback):
    forms = _forms(model, weights)

    assert {forms[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(18)} == {base}
    assert [i for i in range(18) if forms[f"model.layers.{i}.self_attn.v_proj.weight"] == "Q6_K"] == list(DEAR)
    assert [i for i in range(18) if forms[f"model.layers.{i}.mlp.down_proj.weight"] == "Q8_0"] == list(DEAR)
    assert {forms[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(18)} == {"Q8_0", fallback}
    assert forms["lm_head.weight"] == forms["model.embed_tokens.weight"] == "Q6_K"


def test_all_of_six_bits_is_no_mix(library, model):
    forms = _forms(model, "q6_k")
    assert {form for name, form in forms.items() if "down_proj" not in name} == {"Q6_K"}


def test_projections_in_one_get_more_bits(library, model):
    rows = rounding_to("q4_k_m", model)("model.layers.3.self_attn.qkv_proj.weight", torch.zeros(2, 256))
    assert rows is not None
    assert rows.format == Q.Q5_K


def _forms(model, weights):
    quantise = rounding_to(weights, model)
    rows = {name: quantise(name, weight) for name, weight in model.named_parameters() if weight.ndim == 2}
    return {name: each.format.name for name, each in rows.items()}


@pytest.mark.skipif(not ggml.has_ggml(), reason="llama-cpp-python is not installed")
@pytest.mark.parametrize(("form", "error"), [(Q.Q4_K, 0.09), (Q.Q5_K, 0.05), (Q.Q6_K, 0.025)])
def test_ggml_rounds_near(form, error):
    weight = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    rounded = quants.dequantize(ggml.quantise_by_ggml(weight, form), form)
    assert np.sqrt(np.mean((rounded - weight) ** 2)) < error
