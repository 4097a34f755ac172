"""Nodes are ranked on the host as they are on a device."""

import pytest
import torch

from yggdrasil.native import is_native, portable
from yggdrasil.runtime.passes import HostView
from yggdrasil.tree import token_tree
from yggdrasil.tree.token_tree import NO_SCORE, Ranking, TokenTree


@pytest.mark.parametrize("operator", [torch.ops.yggdrasil.rank_nodes, portable.rank_nodes], ids=["native", "portable"])
@pytest.mark.parametrize("seed", range(5))
def test_ranking_on_the_host_is_that_of_the_device(seed, operator):
    tree = TokenTree.allocate(40, candidates=2, device=torch.device("cpu"))
    levels = torch.randint(1, 12, (40,), generator=torch.Generator().manual_seed(seed))  # with equals among them
    tree.scores.copy_(torch.where(levels < 9, -levels / 3, NO_SCORE))
    tree.scores[0] = 0.0
    expected, order = tree.scores.sort(descending=True, stable=True)
    expected = expected.exp().cumsum(0)
    host_order, host_expected = torch.empty_like(order), torch.empty_like(expected)
    operator(tree.scores, host_order, host_expected)

    assert host_order.tolist() == order.tolist()
    torch.testing.assert_close(host_expected, expected, rtol=1e-6, atol=0)


def test_a_view_writes_into_its_tensor():
    order = torch.arange(6)
    HostView(order).write(order.flip(0).numpy())

    assert order.tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("native", [True, False])
def test_a_tree_is_ranked_again_and_again_where_the_pass_reads_it(seed, native, monkeypatch):
    monkeypatch.setattr(token_tree, "is_native", lambda: native and is_native())
    tree, order = TokenTree.on_host(12), torch.empty(12, dtype=torch.int64)
    ranked = Ranking(tree, (1, 2, 4, 12), order)
    generator = torch.Generator().manual_seed(seed)
    for size in (12, 5, 1):
        levels = torch.randint(1, 6, (12,), generator=generator)  # with equals among them
        tree.scores.copy_(torch.where(torch.arange(12) < size, -levels / 3, NO_SCORE))
        tree.scores[0] = 0.0
        tree.depths.copy_(torch.randint(1, 9, (12,), generator=generator))  # of no node behind the last
        tree.depths[0] = 0
        totals = ranked.rank()

        nodes = sorted(range(12), key=lambda node: -float(tree.scores[node]))
        assert order.tolist() == ranked.order.tolist() == nodes
        for total, width in zip(totals, (1, 2, 4, 12), strict=True):
            kept = [node for node in nodes[:width] if node < size]
            assert total == pytest.approx(float(tree.scores[kept].exp().sum()), rel=1e-6)
            assert ranked.depth(width) == max(int(tree.depths[node]) for node in kept)
