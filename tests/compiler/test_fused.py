"""Queries, keys and values by one product, and gate and up: the same tokens, and no weight twice."""

import copy
import weakref
from itertools import pairwise

import pytest
import torch
from test_layer_calls import FEW, decoder_of, interpret, plain_step
from tiny import tiny_model
from tiny_pair import TEXT, TinyPair, random_model

from yggdrasil.checkpoints import fused
from yggdrasil.checkpoints.formats.kinds import Format
from yggdrasil.checkpoints.formats.layers import QuantisedLinear
from yggdrasil.checkpoints.formats.rows import PackedRows
from yggdrasil.checkpoints.fused import FusedLinear, fuse_linears
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.runtime.loading import prepare_model

PROMPT = TEXT[:20]


def fused_pair(model):
    """The model, fused as on a GPU, as target and drafter."""
    untouched = copy.deepcopy(model)
    untouched.set_attn_implementation("eager")
    fuse_linears(model)
    loaded = prepare_model(model, "model", 1, pack=False)
    return TinyPair(loaded, loaded, untouched, untouched)


@pytest.mark.parametrize(
    ("family", "compiler"),
    [("llama", None), ("qwen2", None), ("gemma3", None), ("gemma3", interpret), ("qwen3_moe", interpret)],
    ids=lambda each: each if isinstance(each, str) else "traced" if each else "captured",
)
def test_tokens_are_those_of_transformers(family, compiler):
    pair = fused_pair(tiny_model(family))
    assert any(isinstance(module, FusedLinear) for module in pair.target.model.modules())
    decoder = decoder_of(pair, compiler)

    for speculation in (True, False):
        found = decoder.generate(PROMPT, max_new_tokens=24, speculation=speculation).tokens
        assert found == pair.reference(PROMPT, 24)


def test_a_layer_has_four_products():
    step = plain_step(fused_pair(random_model()).decoder(PLAIN_POLICY, FEW, backend="cudagraph"))
    nodes = step.graphs[0].graph.graph.nodes
    products = [node for node in nodes if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)]

    assert (len(step.graphs), len(products)) == (1, 4)


def test_no_weight_is_there_twice(monkeypatch):
    """But for those of the module that is being changed."""
    model = random_model(num_hidden_layers=4)
    total = sum(weight.numel() for weight in model.parameters())
    former = [weakref.ref(weight) for weight in model.parameters()]
    concatenate, sizes, made = fused._concatenated, [], []

    def watched(layers):
        made.append(concatenate(layers))
        own = sum(weight.numel() for weight in made[-1].parameters())
        there = sum(weight().numel() for weight in former if weight() is not None)
        sizes.append((there + sum(weight.numel() for layer in made for weight in layer.parameters()), own))
        return made[-1]

    monkeypatch.setattr(fused, "_concatenated", watched)
    fuse_linears(model)

    assert len(sizes) == 2 * 4
    assert all(size <= total + own for size, own in sizes)
    assert all(later[0] - later[1] <= total for _, later in pairwise(sizes))
    assert sum(weight.numel() for weight in model.parameters()) == total
    assert [name for name, _ in model.model.layers[0].named_parameters() if "q_proj" in name or "k_proj" in name] == [
        "self_attn.q_proj.layer.weight"
    ]


def quantised(form, num_outputs, *, has_bias=False):
    packed = torch.randint(0, 256, (num_outputs, 34), dtype=torch.uint8)
    bias = torch.randn(num_outputs) if has_bias else None
    return QuantisedLinear(PackedRows(int(form), num_outputs, 32, packed), bias, 1, torch.bfloat16)


class Attention(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = layers


def test_blocks_of_one_format_are_put_one_behind_the_other():
    layers = [quantised(Format.Q8_0, size, has_bias=True) for size in (8, 4, 4)]
    attention = Attention(*layers)
    fuse_linears(attention)
    layer = attention.q_proj.layer

    assert torch.equal(layer.packed, torch.cat([each.packed for each in layers]))
    assert torch.equal(layer.bias, torch.cat([each.bias for each in layers]))
    assert (layer.out_features, layer.in_features, layer.format) == (16, 32, Format.Q8_0)
    assert attention.v_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "others",
    [
        (quantised(Format.Q8_0, 4), quantised(Format.Q5_0, 4)),
        (quantised(Format.Q8_0, 4), quantised(Format.Q8_0, 4, has_bias=True)),
        (quantised(Format.Q8_0, 4), torch.nn.Linear(32, 4, bias=False)),
    ],
)
def test_other_layers_stay_as_they_are(others):
    attention = Attention(quantised(Format.Q8_0, 8), *others)
    before = list(attention.children())
    fuse_linears(attention)

    assert list(attention.children()) == before


def test_another_input_is_computed_again():
    torch.manual_seed(0)
    attention = Attention(*(torch.nn.Linear(8, size) for size in (6, 4, 4)))
    plain, x, y = copy.deepcopy(attention), torch.randn(3, 8), torch.randn(3, 8)
    fuse_linears(attention)

    for given in ((x, x, x), (x, y, y), (y, x, y), (x, x, y)):
        for name, each in zip(("q_proj", "k_proj", "v_proj"), given, strict=True):
            torch.testing.assert_close(getattr(attention, name)(each), getattr(plain, name)(each))
