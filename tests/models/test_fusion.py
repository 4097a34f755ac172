"""Linears that read one tensor become one operator, and compute the same."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import nn

from yggdrasil.models import kernels
from yggdrasil.models.arena import Arena
from yggdrasil.models.compiled import StepKey, build_step
from yggdrasil.models.formats.layers import QuantisedEmbedding, QuantisedLinear
from yggdrasil.models.formats.rows import QuantisedRows
from yggdrasil.models.fusion import fuse_shared_inputs
from yggdrasil.models.packing import PackedLinear


class Block(nn.Module):
    """Three layers over one input, one of them with a bias, and a fourth over another."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = (24, 16, 40)
        self.layers = nn.ModuleList(
            PackedLinear(
                torch.randn(size, 8, generator=generator), torch.ones(size) if size == 16 else None, 1, Arena()
            )
            for size in sizes
        )
        self.last = PackedLinear(torch.randn(4, sum(sizes), generator=generator), None, 1, Arena())

    def forward(self, x):
        return self.last(torch.cat([layer(x) for layer in self.layers], dim=-1))


def test_layers_of_one_input_become_one_operator():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    block = Block()
    exported = torch.export.export(block, (x,), strict=False)

    assert fuse_shared_inputs(exported) == 1

    targets = [node.target for node in exported.graph_module.graph.nodes]
    assert targets.count(torch.ops.yggdrasil.packed_linears.default) == 1
    assert targets.count(torch.ops.yggdrasil.packed_linear.default) == 1
    assert torch.equal(exported.module()(x), block(x))


class QuantisedBlock(nn.Module):
    """Layers over one input in two formats and in full, behind a quantised embedding."""

    def __init__(self):
        super().__init__()
        self.table = QuantisedEmbedding(packed_rows("Q8_0", 40), torch.bfloat16)
        bias = torch.ones(16, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(
            [
                QuantisedLinear(packed_rows("Q4_0", 24), None, 1),
                QuantisedLinear(packed_rows("Q5_1", 16), bias, 1),
                PackedLinear(torch.ones(8, 64, dtype=torch.bfloat16), None, 1, Arena()),
            ]
        )

    def forward(self, ids):
        x = self.table(ids)
        return [layer(x) for layer in self.layers]


class OverTensors(nn.Module):
    """A block as steps are written: its tensors are inputs."""

    def __init__(self, block, names):
        super().__init__()
        self.block, self.names = (block,), names  # no submodule

    def forward(self, weights, caches, ids):
        return torch.func.functional_call(self.block[0], dict(zip(self.names, weights, strict=True)), (ids,))


def packed_rows(name, num_outputs):
    form = GGMLQuantizationType[name]
    generator = torch.Generator().manual_seed(num_outputs)
    weight = torch.randn(num_outputs, 64, generator=generator).numpy()
    return QuantisedRows(form, torch.from_numpy(quants.quantize(weight, form))).pack(Arena())


@pytest.mark.compiled
@pytest.mark.skipif(not kernels.is_native(), reason="no C++ compiler on this machine")
def test_quantised_layers_of_one_input_are_fused_and_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    block, ids = QuantisedBlock(), torch.tensor([[3, 0, 39]])
    exported = torch.export.export(block, (ids,), strict=False)

    assert fuse_shared_inputs(exported) == 1
    targets = [node.target for node in exported.graph_module.graph.nodes]
    assert targets.count(torch.ops.yggdrasil.quantised_linears.default) == 1
    assert targets.count(torch.ops.yggdrasil.packed_linear.default) == 1
    tensors = dict(block.named_buffers())
    inputs = [list(tensors.values()), [torch.zeros(1)], ids]
    step = build_step(OverTensors(block, list(tensors)), inputs, StepKey("block", 3, "", ""), "inductor")
    for ours, theirs in zip(step(), block(ids), strict=True):
        assert torch.equal(ours, theirs)
