"""Greedy acceptance against a walk down the tree."""

import random

import pytest
import torch

from yggdrasil.acceptance.greedy import accept_greedy, walk_greedy


class Rows:
    """A random tree of ``size`` rows in a pass of ``width``; the other rows are padding that looks like anything."""

    def __init__(self, seed, size, width, num_tokens):
        rng = random.Random(seed)
        self.tokens, self.parents, self.paths = [rng.randrange(num_tokens)], [0], [[0]]
        while len(self.tokens) < size:
            parent, token = rng.randrange(len(self.tokens)), rng.randrange(num_tokens)
            siblings = {self.tokens[i] for i in range(1, len(self.tokens)) if self.parents[i] == parent}
            if token not in siblings:
                self.paths.append([*self.paths[parent], len(self.tokens)])
                self.tokens.append(token)
                self.parents.append(parent)
        self.size = size
        self.exists = [row < size for row in range(width)]
        self.ancestors = torch.eye(width, dtype=torch.bool)
        for row, path in enumerate(self.paths):
            self.ancestors[row, path] = True
        for row in range(size, width):
            self.tokens.append(rng.randrange(num_tokens))
            self.parents.append(rng.randrange(width))
            if rng.random() < 0.5:  # stale: as if it still were the child of a row
                self.ancestors[row] |= self.ancestors[rng.randrange(size)]
        self.choices = [rng.randrange(num_tokens) for _ in range(width)]

    def accept(self):
        last, accepted = accept_greedy(
            torch.tensor(self.tokens), torch.tensor(self.parents), self.ancestors, torch.tensor(self.exists),
            torch.tensor(self.choices),
        )  # fmt: skip
        assert last.shape == (1,)
        return int(last), torch.nonzero(accepted).flatten().tolist()

    def walk(self):
        path = [0]
        while True:
            following = [
                row
                for row in range(1, self.size)
                if self.parents[row] == path[-1] and self.tokens[row] == self.choices[path[-1]]
            ]
            if not following:
                return path
            path += following


@pytest.mark.parametrize("num_tokens", [2, 3, 4])
@pytest.mark.parametrize("padding", [0, 1, 7])
def test_acceptance_is_a_walk_along_the_choices(padding, num_tokens):
    lengths = set()
    for seed in range(150):
        size = 1 + seed % 16
        rows = Rows(seed, size, size + padding, num_tokens)
        path = rows.walk()
        assert rows.accept() == (path[-1], path), seed
        lengths.add(len(path))

    assert {1, 2, 3, 4} <= lengths


@pytest.mark.parametrize("num_tokens", [2, 4])
@pytest.mark.parametrize("padding", [0, 7])
def test_the_host_accepts_what_the_device_does(padding, num_tokens):
    """Rows hold nodes whose numbers have gaps, as after pruning."""
    lengths = set()
    for seed in range(60):
        rows = Rows(seed, size=6, width=6 + padding, num_tokens=num_tokens)
        nodes = [3 * row for row in range(len(rows.tokens))]
        parents = [3 * parent for parent in rows.parents]

        found = walk_greedy(nodes, rows.tokens, parents, rows.exists, rows.choices)

        assert found == rows.accept()[1]
        lengths.add(len(found))
    assert len(lengths) > 2
