"""Mixtures in GGUF files: experts run on the file's blocks, which are widened nowhere."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf import GGUFReader, dequantize
from gguf_files import tiny_model, write_gguf
from test_experts import native_only
from test_formats import assert_trees_give_the_plain_text_and_its_cache
from test_gguf import CPU, assert_nearly_alike, logits, own_cache  # noqa: F401  (the cache is a fixture)

from yggdrasil.artifacts.gguf import read_gguf_header
from yggdrasil.checkpoints.experts import PackedExperts
from yggdrasil.checkpoints.facts import load_config
from yggdrasil.checkpoints.formats.layers import QuantisedExperts
from yggdrasil.checkpoints.gguf.rows import blocks_of
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loading import load_model

# Of five experts, each layer's and each matrix's in a format of its own.
KINDS = {
    "blk.0.ffn_gate_exps.weight": Q.Q4_0, "blk.0.ffn_up_exps.weight": Q.Q5_1, "blk.0.ffn_down_exps.weight": Q.Q8_0,
    "blk.1.ffn_gate_exps.weight": Q.Q5_0, "blk.1.ffn_up_exps.weight": Q.Q4_1, "blk.1.ffn_down_exps.weight": Q.Q4_1,
}  # fmt: skip
EXPERTS = [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]


def kind_of(name, **others):
    return others.get(name.split(".")[-2]) or KINDS.get(name, Q.Q8_0)


def mixture(**changes):
    return tiny_model("qwen3_moe", num_experts=5, num_experts_per_tok=3, **changes)


def write(folder, model=None, kind=kind_of, **options):
    return write_gguf(folder / "model.gguf", model or mixture(vocab_size=96), "qwen3_moe", kind, **options)


def experts_of(loaded):
    return [layer.mlp.experts for layer in loaded.model.model.layers]


def kept(file):
    """The folder of what is widened beside the blocks."""
    return Source.find(file).checkpoint(torch.float32, keeps_blocks=True)


def test_a_files_experts_are_those_of_the_model(tmp_path):
    """Gate before up, as transformers has them in one; each dequantised by its own format."""
    file = write(tmp_path)
    model = load_model(file, torch.float32, CPU, 1, pack=False).model
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(file).tensors}

    config = model.config
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (5, 3, 32)
    assert config.norm_topk_prob
    for number, layer in enumerate(model.model.layers):
        gate, up, down = (stored[f"blk.{number}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        assert np.array_equal(layer.mlp.experts.gate_up_proj, np.concatenate([gate, up], axis=1))
        assert np.array_equal(layer.mlp.experts.down_proj, down)


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_experts_run_on_the_files_blocks(tmp_path, dtype):
    file = write(tmp_path)
    full, loaded = (load_model(file, dtype, CPU, 1, weights=weights) for weights in ("full", "file"))

    assert [type(experts) for experts in experts_of(loaded)] == [QuantisedExperts] * 2
    assert [form for experts in experts_of(loaded) for form in experts.formats] == [*KINDS.values()]
    assert list(loaded.formats.values()) == [Q.Q8_0] * 5 + [*KINDS.values()][:3] + [Q.Q8_0] * 4 + [*KINDS.values()][
        3:
    ] + [Q.Q8_0]
    generator = torch.Generator().manual_seed(0)
    rows, shares = torch.randn(40, 64, generator=generator).to(dtype), torch.rand(40, 2, generator=generator)
    index = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(40)])
    for ours, theirs in zip(experts_of(loaded), experts_of(full), strict=True):
        expected = theirs(rows, index, shares)
        assert (ours(rows, index, shares) - expected).std() < 0.03 * expected.std()
    assert_nearly_alike(full, loaded, 0.15)


@native_only
def test_what_is_read_as_blocks_is_widened_nowhere(tmp_path):
    from safetensors import safe_open

    file = write(tmp_path, kind=lambda name: kind_of(name, attn_q=Q.F16))
    loaded = load_model(file, torch.float32, CPU, 1, weights="file")
    with safe_open(kept(file) / "model.safetensors", "pt") as stored:
        names = set(stored.keys())

    assert {name for name in names if "norm" not in name} == {
        f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("mlp.gate", "self_attn.q_proj")
    }
    assert not [folder for folder in kept(file).parent.iterdir() if folder.name == "float32"]
    blocks = sum(
        place.num_bytes for places in blocks_of(read_gguf_header(file), load_config(file)).values() for place in places
    )
    packed = sum(tensor.nbytes for tensor in loaded.tensors.values() if tensor.dtype == torch.uint8)
    assert packed == pytest.approx(blocks, rel=0.05)  # 97 rows of tables fill no whole panels
    assert {tensor.dtype for name, tensor in loaded.tensors.items() if "experts" in name} == {torch.uint8}


@native_only
@pytest.mark.parametrize("part", ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"])
def test_experts_of_which_one_weight_is_in_no_format_of_the_kernels_are_full(tmp_path, part):
    file = write(tmp_path, kind=lambda name: kind_of(name, **({part: Q.F16} if name.startswith("blk.1") else {})))
    full, loaded = (load_model(file, torch.float32, CPU, 1, weights=weights) for weights in ("full", "file"))

    assert [type(experts) for experts in experts_of(loaded)] == [QuantisedExperts, PackedExperts]
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(*(getattr(experts_of(each)[1], name) for each in (full, loaded)))


@native_only
def test_trees_over_a_files_experts_give_the_plain_text_and_its_cache(tmp_path):
    assert_trees_give_the_plain_text_and_its_cache(load_model(write(tmp_path), torch.bfloat16, CPU, 1, weights="file"))


FACTS = "qwen3moe.expert_"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leave_out": ["blk.1.ffn_up_exps.weight"]}, r"lacks blk\.1\.ffn_up_exps\.weight; it cannot be loaded"),
        ({"leave_out": ["blk.0.ffn_gate_inp.weight"]}, r"lacks blk\.0\.ffn_gate_inp\.weight; it cannot be loaded"),
        ({"facts": {f"{FACTS}used_count": 6}}, r"its expert_count is 5, its expert_used_count is 6, .*; fetch"),
        ({"facts": {f"{FACTS}used_count": 0}}, r"its expert_used_count is 0, .*, which is unsupported"),
        ({"facts": {f"{FACTS}count": "5"}}, r"its expert_count is '5', its .*, which is unsupported"),
        ({"facts": {f"{FACTS}weights_scale": 2.5}}, r"its expert_weights_scale is 2\.5, which is unsupported"),
        ({"facts": {f"{FACTS}count": 4}}, r"blk\.0\.ffn_\w+\.weight has the shape \[5, .* where the model .* \[4, "),
        ({"facts": {f"{FACTS}feed_forward_length": 64}}, r"blk\.0\.ffn_\w+_exps\.weight has the shape \[5, "),
    ],
)
@pytest.mark.parametrize("weights", ["full", pytest.param("file", marks=native_only)])
def test_a_mixture_that_is_none_is_one_sentence(tmp_path, options, message, weights):
    file = write(tmp_path, **options)

    with pytest.raises(YggdrasilError, match=message):
        load_model(file, torch.float32, CPU, 1, weights=weights)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
