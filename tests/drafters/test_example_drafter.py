"""The example that users start from decodes without loss, and pays."""

import pytest
import torch
from example_drafter import LastFollowerDrafter
from toy_target import decode, plain_decode, wandering_target

from yggdrasil.tree.token_tree import TokenTree

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 32])
def test_output_equals_plain_decoding(num_nodes):
    tree = TokenTree.allocate(num_nodes, candidates=2, device=torch.device("cpu"))
    decoded = decode(LastFollowerDrafter(), wandering_target, PROMPT, 80, tree)

    assert decoded.tokens == plain_decode(wandering_target, PROMPT, 80)


def test_a_target_that_repeats_needs_few_iterations():
    tree = TokenTree.allocate(8, candidates=2, device=torch.device("cpu"))
    decoded = decode(LastFollowerDrafter(), lambda text: (text[-1] + 1) % 5, PROMPT, 80, tree)

    assert decoded.tokens == plain_decode(lambda text: (text[-1] + 1) % 5, PROMPT, 80)
    assert decoded.num_iterations < 25  # four drafted tokens and the bonus token an iteration, once all were seen
