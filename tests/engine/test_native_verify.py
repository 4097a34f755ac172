"""Rows chosen and accepted by native calls are those of the step that is traced."""

import pytest
import torch

from yggdrasil.engine.targets.steps import VerifyLogitsStep, VerifyStep
from yggdrasil.engine.targets.target import NativeVerifyLogitsStep, NativeVerifyStep
from yggdrasil.native import is_native
from yggdrasil.runtime.passes import Forward
from yggdrasil.tree.token_tree import TokenTree

pytestmark = pytest.mark.skipif(not is_native(), reason="the native library is not there")
NODES, WIDTH, ALPHABET = 24, 10, 3


class FakeHead:
    def __init__(self, best, choices):
        self._found = best, choices

    def best(self, rows, logits):
        return self._found

    def logits(self, rows):
        return self._found[0][:, None] + torch.arange(ALPHABET)


class FakeCall:
    """Hands out choices that were drawn before, and notes what it was called with."""

    vocab_size, hidden_layers = ALPHABET, ()

    def __init__(self, best, choices):
        self._head, self.calls = FakeHead(best, choices), []

    def __call__(self, weights, caches, *inputs):
        self.calls.append([tensor.clone() for tensor in inputs])
        return Forward(torch.zeros(WIDTH, 4), [torch.ones(WIDTH, 4)], self._head)


def random_tree(seed):
    """A tree whose siblings hold different tokens, its last nodes missing, and the nodes that are verified."""
    generator = torch.Generator().manual_seed(seed)
    tree = TokenTree.allocate(NODES, 2, torch.device("cpu"))
    taken = {}
    tree.scores[0] = 0.0
    count = int(torch.randint(WIDTH // 2, NODES, (1,), generator=generator))
    for node in range(1, NODES):
        free = [n for n in range(node) if len(taken.get(n, ())) < ALPHABET]
        parent = free[int(torch.randint(0, len(free), (1,), generator=generator))]
        token = next(
            t for t in torch.randperm(ALPHABET, generator=generator).tolist() if t not in taken.get(parent, ())
        )
        taken.setdefault(parent, set()).add(token)
        tree.tokens[node], tree.parents[node], tree.depths[node] = token, parent, tree.depths[parent] + 1
        tree.ancestors[node] |= tree.ancestors[parent]
        if node < count:
            tree.scores[node] = tree.scores[parent] - torch.rand(1, generator=generator) - 0.01
    return tree, tree.scores.sort(descending=True, stable=True).indices[:WIDTH], generator


def test_both_steps_read_the_same_rows_and_accept_the_same_path():
    lengths = set()
    for seed in range(40):
        tree, chosen, generator = random_tree(seed)
        choices = torch.randint(0, ALPHABET, (WIDTH,), generator=generator)
        best = torch.randn(WIDTH, generator=generator)
        if seed % 4 == 0:
            best[int(torch.randint(0, WIDTH, (1,), generator=generator))] = torch.nan
        calls = FakeCall(best, choices), FakeCall(best, choices)
        inputs = [], [], torch.tensor([17]), chosen, *tree.tensors()

        expected, ours = VerifyStep(calls[0])(*inputs), NativeVerifyStep(calls[1])(*inputs)

        for one, other in zip(expected, ours, strict=True):
            assert torch.equal(one, other), seed
        for one, other in zip(calls[0].calls[0], calls[1].calls[0], strict=True):
            assert torch.equal(one, other), seed
        lengths.add(int(ours[0][0]))
    assert {1, 2, 3} <= lengths  # else the comparison would show little


def test_both_steps_that_return_logits_lay_out_the_same_rows():
    found = set()
    for seed in range(40):
        tree, chosen, _ = random_tree(seed)
        calls = [FakeCall(torch.randn(WIDTH), None) for _ in range(2)]
        calls[1]._head = calls[0]._head
        inputs = [], [], torch.tensor([17]), chosen, *tree.tensors()

        expected, ours = VerifyLogitsStep(calls[0])(*inputs), NativeVerifyLogitsStep(calls[1])(*inputs)

        for one, other in zip(expected, ours, strict=True):
            assert torch.equal(one, other), seed
        for one, other in zip(calls[0].calls[0], calls[1].calls[0], strict=True):
            assert torch.equal(one, other), seed
        found.add(int(ours[0][3].sum()))
    assert len(found) > 1  # passes with padding too
