"""A chain written in one go is the tree that single attachments make, whatever the tree held before."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.engine.chain import ChainWriter
from yggdrasil.tree.growth import rank_nodes
from yggdrasil.tree.token_tree import TokenTree

CPU = torch.device("cpu")
RATES = st.lists(st.floats(0.01, 1.0), max_size=7)


@settings(max_examples=100)
@given(st.lists(RATES, min_size=1, max_size=3))
def test_a_chain_equals_single_attachments(chains):
    tree = TokenTree.allocate(8, 2, CPU)
    tree.plant(9)
    for parent, token in ((0, 1), (0, 2), (1, 3), (2, 4), (2, 5)):
        tree.attach(parent, token, -0.5)  # a drafted tree, with branches
    writer = ChainWriter(tree)
    addresses = [buffer.data_ptr() for buffer in tree.tensors()]
    for rates in chains:
        twin = TokenTree.allocate(8, 2, CPU)
        twin.plant(3)
        for i, rate in enumerate(rates):
            twin.attach(i, 10 + i, np.log(rate))
        writer.write(3, range(10, 10 + len(rates)), np.cumprod(rates))

        tree.check_integrity()
        size = 1 + len(rates)
        assert tree.size == twin.size == size
        for name in ("tokens", "parents", "depths", "ancestors"):
            assert torch.equal(getattr(tree, name)[:size], getattr(twin, name)[:size]), name
        for name in ("scores", "edges"):
            torch.testing.assert_close(getattr(tree, name)[:size], getattr(twin, name)[:size], atol=1e-3, rtol=1e-4)
        assert rank_nodes(tree)[0][:size].tolist() == writer.order[:size].tolist()
    assert [buffer.data_ptr() for buffer in tree.tensors()] == addresses
    tree.plant(2)
    tree.attach(0, 3, -0.1)
    tree.check_integrity()


@pytest.mark.parametrize(("tokens", "estimates"), [(4, 4), (2, 3)])
def test_a_chain_that_does_not_fit_is_refused_and_nothing_written(tokens, estimates):
    tree = TokenTree.allocate(4, 1, CPU)
    before = [buffer.clone() for buffer in tree.tensors()]
    with pytest.raises(ValueError, match="for a tree of 4 nodes"):
        ChainWriter(tree).write(0, range(tokens), [0.5] * estimates)

    assert all(torch.equal(now, then) for now, then in zip(tree.tensors(), before, strict=True))
