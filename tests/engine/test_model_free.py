"""Guesses that cost no pass, beside a tree that another drafter grows."""

from types import SimpleNamespace

import pytest
import torch

from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.engine.model_free import ModelFreeDrafts
from yggdrasil.tree.token_tree import TokenTree


@pytest.mark.parametrize("ranks_nodes", [True, False])
def test_a_tree_that_is_ranked_on_the_device_is_filled_by_nobody(ranks_nodes):
    """Its pass reads the nodes that its own step ranked, before the host could add to them."""
    target = SimpleNamespace(ranks_nodes=ranks_nodes, order=torch.arange(16))
    guesses = ModelFreeDrafts(DrafterGroup([NGramDrafter()]), target, TokenTree.on_host(16), (1, 4), shares_tree=False)

    assert guesses.can_fill != ranks_nodes
