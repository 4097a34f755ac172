"""Linears that read one tensor become one operator, and compute the same."""

import torch
from torch import nn

from yggdrasil.models.arena import Arena
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
