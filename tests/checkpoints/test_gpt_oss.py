"""gpt-oss as it is published: experts in MXFP4, in a folder's two tensors or in a GGUF file's blocks."""

import copy
import json

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from test_experts import native_only
from test_gguf import logits, own_cache, own_logits  # noqa: F401  (the cache is a fixture)
from tiny import sharpened, tiny_config
from transformers import AutoModelForCausalLM

from yggdrasil.checkpoints.formats.kinds import Format
from yggdrasil.checkpoints.formats.layers import QuantisedExperts
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.runtime.loading import load_model
from yggdrasil.runtime.selfcheck import check_tree_attention

CPU = torch.device("cpu")
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_experts(outputs, inputs, seed):
    """Blocks and scales as published, and the weights [E, outputs, inputs] that they are of four experts."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (4, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 126, (4, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()  # neighbours lie in one byte
    return blocks, scales, (CODES[codes] * torch.exp2(scales.float() - 127)[..., None]).flatten(2)


@pytest.fixture
def published(tmp_path):
    """A folder with MXFP4 experts, and the model of the same numbers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("gpt_oss"), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in sharpened(model, 4, noise=0.3).parameters():
            parameter.copy_(parameter.bfloat16())
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for number, layer in enumerate(model.model.layers):
        experts, name = layer.mlp.experts, f"model.layers.{number}.mlp.experts"
        for part, outputs, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            blocks, scales, weights = random_experts(outputs, inputs, number)
            stored[f"{name}.{part}_blocks"], stored[f"{name}.{part}_scales"] = blocks, scales
            del stored[f"{name}.{part}"]
            getattr(experts, part).data = weights.transpose(1, 2)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, model


@native_only
def test_a_folders_experts_stay_in_mxfp4_or_become_the_numbers_that_they_are(published):
    folder, model = published
    full = load_model(folder, torch.float32, CPU, 1)
    torch.testing.assert_close(own_logits(folder), logits(model), rtol=1e-4, atol=1e-4)
    check_tree_attention(full)

    loaded = load_model(folder, torch.bfloat16, CPU, 1, weights="file")
    experts = [layer.mlp.experts for layer in loaded.model.model.layers]
    assert usual_weights(str(folder), "bfloat16", "cpu") == "file"
    assert [type(each) for each in experts] == [QuantisedExperts] * 2
    assert {form for each in experts for form in each.formats} == {Format.MXFP4}
    rows, index, shares = torch.randn(9, 64), torch.arange(18).view(9, 2) % 4, torch.rand(9, 2)
    for ours, theirs in zip(experts, full.model.model.layers, strict=True):
        expected = theirs.mlp.experts(rows, index, shares)
        assert (ours(rows, index, shares) - expected).std() < 0.02 * expected.std()  # rows have 8 bits
    check_tree_attention(loaded)


@native_only
def test_a_gguf_file_of_mxfp4_is_the_model_of_the_folder(published, tmp_path_factory):
    folder, model = published
    kinds = lambda name: Q.MXFP4 if "_exps" in name else Q.F32  # noqa: E731
    file = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", model, "gpt_oss", kinds)

    ours, theirs = (load_model(each, torch.bfloat16, CPU, 1, weights="file") for each in (file, folder))
    assert ours.formats == theirs.formats
    rows, index, shares = torch.randn(9, 64), torch.arange(18).view(9, 2) % 4, torch.rand(9, 2)
    for pair in zip(ours.model.model.layers, theirs.model.model.layers, strict=True):
        assert torch.equal(*(layer.mlp.experts(rows, index, shares) for layer in pair))
    torch.testing.assert_close(own_logits(file), logits(model), rtol=1e-4, atol=1e-4)
