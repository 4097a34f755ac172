"""The scripts that train a small mixture and count the experts that the rows of its trees share."""

import numpy as np
import pytest
import torch
from shared_experts import ONLY_EXPERTS, Costs, Tree, accepted, by_experts, by_probability, draft, read
from shared_experts import main as measure
from train_mixture import main as train
from train_mixture import router
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def tree():
    """A root and two children; the likelier one chooses experts of its own, the other the root's."""
    experts = np.zeros((1, 3, 4), dtype=bool)
    experts[0, [0, 2], :2] = experts[0, 1, 2:] = True
    return Tree(np.arange(3), np.zeros(3, dtype=int), np.log([1, 0.5, 0.45]), experts, np.array([False, False, True]))


def test_a_choice_by_experts_takes_the_node_that_reads_nothing_more(tree):
    scores, costs = np.exp(tree.edges), Costs(ONLY_EXPERTS, 2)

    assert [costs.exactly(tree, nodes) for nodes in ([0], [0, 2], [0, 1])] == [1.0, 1.0, 2.0]
    assert by_experts(tree, scores, tree.experts.astype(float), costs, is_ordered=False) == [0, 2]
    assert by_experts(tree, scores, tree.experts.astype(float), costs, is_ordered=True) == [0]
    assert by_probability(scores, np.array([1.0, 1.2, 2.0])) == [0, 1]
    assert [accepted(tree, nodes) for nodes in ([0, 1], [0, 2])] == [1, 2]


def test_a_router_tells_rows_apart_that_share_a_direction():
    torch.manual_seed(0)
    rows = torch.randn(256, 16) + 5
    logits = rows @ router(rows, 8).T

    torch.testing.assert_close(logits.mean(0), torch.zeros(8), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits.std(0), torch.ones(8))


@torch.no_grad()
def test_a_tree_is_drafted_and_read_as_its_paths_alone():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.5,
    )  # fmt: skip
    model, prefix = LlamaForCausalLM(config).eval(), torch.tensor([[3, 4, 5, 6]])
    tokens, parents, edges = draft(model, prefix, torch.tensor([7]), width=2, depth=2)
    logits, _ = read(model, prefix, tokens, parents)

    assert tokens.shape == (1, 5)
    for node in range(1, 5):
        path = [node]
        while path[0]:
            path.insert(0, int(parents[0, path[0]]))
        alone = model(torch.cat([prefix, tokens[:, path]], dim=1)).logits[0]
        torch.testing.assert_close(logits[0, node], alone[-1], atol=1e-4, rtol=1e-4)
        assert edges[0, node] == pytest.approx(float(alone[-2].log_softmax(-1)[tokens[0, node]]), abs=1e-4)


def test_a_mixture_is_trained_and_its_trees_are_compared(tmp_path, capsys):
    train(tmp_path / "mixture", steps=1, experts=4, chosen=2, width=8, blocks=100)
    measure(tmp_path / "mixture", places=8, width=2, depth=2, tokens=512)

    said = capsys.readouterr().out
    assert "| 8 |" in said
    assert "| experts alone | nodes by predicted experts |" in said
