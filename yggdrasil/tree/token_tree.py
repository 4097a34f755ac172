"""The token tree of one iteration: static buffers, and the invariants that make them a tree.

Node 0 is the root: the last token that is certain, whose successors are being guessed. Nodes are numbered in the order
in which they were attached, so a parent always comes before its children. Buffers are allocated once and only ever
written in place; compiled steps hold their addresses.

Dims: N node capacity, K candidates kept a node, P = N*K pool entries.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.native import is_native
from yggdrasil.native.direct import direct, native_ranking
from yggdrasil.runtime.buffers import HostView

NO_SCORE = float("-inf")
MIN_DESCENT = -1e-4  # a host-attached node scores at least this far below its parent: a choice by score stays connected


@dataclass(frozen=True)
class TokenTree:
    """Buffers of one tree. A node exists when its score is finite; the rest of each buffer is stale."""

    tokens: Tensor  # [N] int64
    parents: Tensor  # [N] int64, the root's is 0
    depths: Tensor  # [N] int64, the root's is 0
    scores: Tensor  # [N] float32, log of the estimated probability that the whole path is accepted; root 0
    edges: Tensor  # [N] float32, the drafter's own log-probability of the token given its parent; root 0
    ancestors: Tensor  # [N, N] bool, row i marks the path from the root to i, both included
    pool_scores: Tensor  # [P] float32, score a candidate would have as a node; -inf where taken or absent
    pool_edges: Tensor  # [P] float32
    pool_tokens: Tensor  # [P] int64; the candidates of node i are entries i*K .. i*K+K-1

    @classmethod
    def allocate(cls, num_nodes: int, candidates: int, device: torch.device) -> "TokenTree":
        """Buffers for ``num_nodes`` nodes (root included) with ``candidates`` remembered continuations each."""
        if num_nodes < 1 or candidates < 1:
            raise ValueError(f"a tree needs a root and a candidate, got {num_nodes = }, {candidates = }")
        pool = num_nodes * candidates

        def integers(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        def floats(size: int, value: float) -> Tensor:
            return torch.full((size,), value, dtype=torch.float32, device=device)

        return cls(
            tokens=integers(num_nodes),
            parents=integers(num_nodes),
            depths=integers(num_nodes),
            scores=floats(num_nodes, NO_SCORE),
            edges=floats(num_nodes, 0.0),
            ancestors=torch.eye(num_nodes, dtype=torch.bool, device=device),
            pool_scores=floats(pool, NO_SCORE),
            pool_edges=floats(pool, 0.0),
            pool_tokens=integers(pool),
        )

    @classmethod
    def on_host(cls, num_nodes: int, candidates: int = 1) -> "TokenTree":
        """Buffers on the host, as a rule for model-free drafts, which need no pool of candidates."""
        with torch.inference_mode(False):  # buffers made in inference mode could not be written outside it
            return cls.allocate(num_nodes, candidates, torch.device("cpu"))

    @property
    def num_nodes(self) -> int:
        """Capacity N."""
        return self.tokens.shape[0]

    @property
    def candidates(self) -> int:
        """Continuations remembered a node, K."""
        return self.pool_tokens.shape[0] // self.tokens.shape[0]

    def node_tensors(self) -> list[Tensor]:
        """The buffers of nodes, without the pool of candidates."""
        return [self.tokens, self.parents, self.depths, self.scores, self.edges, self.ancestors]

    def tensors(self) -> list[Tensor]:
        """All buffers in field order: how compiled steps take a tree."""
        return [*self.node_tensors(), self.pool_scores, self.pool_edges, self.pool_tokens]

    def take_nodes(self, other: "TokenTree") -> None:
        """Copy the nodes of ``other``, a tree of the same capacity; the pool of candidates stays."""
        for ours, theirs in zip(self.node_tensors(), other.node_tensors(), strict=True):
            ours.copy_(theirs)

    def root_guesses(self) -> Tensor:
        """Log-probabilities of the root's candidates after a head draft, best first, [K]; -inf where there is none.

        A copy on the host. Before the tree grows: candidates that became nodes have left the pool.
        """
        first = slice(self.candidates)
        return torch.where(torch.isfinite(self.pool_scores[first]), self.pool_edges[first], NO_SCORE).cpu()

    def plant(self, token: int) -> None:
        """Forget every node and make ``token`` the root."""
        self.scores.fill_(NO_SCORE)
        self.pool_scores.fill_(NO_SCORE)
        self.ancestors.copy_(torch.eye(self.num_nodes, dtype=torch.bool, device=self.tokens.device))
        for buffer in (self.parents, self.depths, self.edges):
            buffer[0] = 0
        self.tokens[0] = token
        self.scores[0] = 0.0

    def attach(self, parent: int, token: int, log_probability: float) -> int:
        """Add one node below ``parent`` from the host and return its number.

        ``log_probability`` (at most 0) estimates that ``token`` follows its parent. For drafters that draft on the
        host; model drafters grow the tree inside their compiled steps.

        Raises:
            ValueError: full tree, unknown parent, ``log_probability`` not at most 0, or a sibling with the same token.
            TypeError: ``token`` is no whole number.
        """
        node = self.size
        if node >= self.num_nodes:
            raise ValueError(f"the tree is full: {self.num_nodes} nodes")
        if not 0 <= parent < node:
            raise ValueError(f"parent {parent} is not a node of a tree of {node}")
        if not log_probability <= 0:
            raise ValueError(f"log_probability must be at most 0, got {log_probability}")
        token = operator.index(token)  # a fraction would be cut to another token
        siblings = (self.parents[1:node] == parent) & (self.tokens[1:node] == token)
        if bool(siblings.any()):
            raise ValueError(f"node {parent} already has a child with token {token}")
        self.tokens[node] = token
        self.parents[node] = parent
        self.depths[node] = self.depths[parent] + 1
        self.edges[node] = log_probability
        self.scores[node] = self.scores[parent] + min(log_probability, MIN_DESCENT)
        self.ancestors[node] = self.ancestors[parent]
        self.ancestors[node, node] = True
        return node

    def graft(self, parents: Sequence[int], tokens: Sequence[int], log_probabilities: Sequence[float]) -> int:
        """Merge a tree drafted on the host into this one, below the root; returns how many nodes were added.

        Node i is a child of node ``parents[i] - 1`` of these, or of the root where ``parents[i]`` is 0. Nodes that
        the tree has are skipped; new ones are attached as by ``attach``, in a fixed number of writes, until it is full.

        Raises:
            ValueError: a parent that does not come first or a positive log-probability; nothing is written then.
        """
        scores = [score for score in self.scores.tolist() if math.isfinite(score)]
        size = len(scores)
        above, labels = self.parents.tolist()[:size], self.tokens.tolist()[:size]
        children = {(above[node], labels[node]): node for node in range(1, size)}
        depths, edges = self.depths.tolist()[:size], [0.0] * size
        nodes = [0]  # the node here of each given one, the root first
        for parent, token, log_probability in zip(parents, tokens, log_probabilities, strict=True):
            if not 0 <= parent < len(nodes):
                raise ValueError(f"node {len(nodes)} has the parent {parent}, which does not come before it")
            if log_probability > 0:
                raise ValueError(f"log_probability must be at most 0, got {log_probability}")
            below = nodes[parent]
            node = children.get((below, token))
            if node is None:
                if len(above) == self.num_nodes:
                    break
                node = children[below, token] = len(above)
                above.append(below)
                labels.append(token)
                depths.append(depths[below] + 1)
                scores.append(scores[below] + min(log_probability, MIN_DESCENT))
                edges.append(log_probability)
            nodes.append(node)
        if len(above) == size:
            return 0
        for buffer, values in zip(
            (self.tokens, self.parents, self.depths, self.scores, self.edges),
            (labels, above, depths, scores, edges),
            strict=True,
        ):
            _write(buffer, size, values[size:])
        _write(self.ancestors, size, [self._marks(node, above) for node in range(size, len(above))])
        return len(above) - size

    def _marks(self, node: int, parents: Sequence[int]) -> list[bool]:
        """The row of ``node`` among the ancestors."""
        marks = [False] * self.num_nodes
        marks[0] = True
        while node:
            marks[node] = True
            node = parents[node]
        return marks

    @property
    def size(self) -> int:
        """Nodes in the tree, the root included."""
        return int(torch.isfinite(self.scores).sum())

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        return torch.nonzero(self.ancestors[node]).flatten().tolist()

    def check_integrity(self) -> None:
        """Assert every invariant; for tests and authors of drafters."""
        size = self.size
        exists = torch.isfinite(self.scores)
        assert bool(exists[:size].all()), "nodes are not numbered without gaps"
        assert self.scores[0] == 0, "the root must have score 0"
        assert self.depths[0] == 0, "the root must have depth 0"
        seen: set[tuple[int, int]] = set()
        for node in range(1, size):
            parent, token = int(self.parents[node]), int(self.tokens[node])
            assert parent < node, f"{parent = } does not come before {node = }"
            assert self.depths[node] == self.depths[parent] + 1, f"depth of {node = }"
            assert self.scores[node] < self.scores[parent], f"score of {node = } is not below its parent's"
            expected = self.ancestors[parent].clone()
            expected[node] = True
            assert torch.equal(self.ancestors[node], expected), f"ancestors of {node = }"
            assert (parent, token) not in seen, f"{node = } repeats token {token} below {parent = }"
            seen.add((parent, token))


class Ranking:
    """Ranks the nodes of one tree by score, best first, ties to the lower number; runs in every iteration.

    Args:
        order: [N] int64 that receives the ranking; a buffer of its own where none is given.

    Dims: N nodes, V verify widths.
    """

    def __init__(self, tree: TokenTree, verify_widths: Sequence[int], order: Tensor | None = None) -> None:
        device = tree.scores.device
        order = torch.empty_like(tree.parents) if order is None else order
        self._buffers = tree.scores, tree.depths, order
        self._widths = torch.tensor(verify_widths)
        self._totals = torch.ones(len(verify_widths), dtype=torch.float64)
        self._levels = torch.zeros(len(verify_widths), dtype=torch.int64)
        self._order = HostView(order)
        self._given: Any = self._totals.numpy().data  # as a list sooner than the array is
        self._deepest: memoryview = self._levels.numpy().data
        self._indices = {width: index for index, width in enumerate(verify_widths)}
        self._rank: Callable[[], int] = self._rank_portably
        if device.type == "cpu" and is_native():
            self._native = native_ranking(*self._buffers, self._widths, self._totals, self._levels)
            self._rank = direct("rank", self._native)

    def rank(self) -> list[float]:
        """Rank the nodes; returns the tokens to expect at each verify width by their scores, bonus included."""
        if self._rank() < 0:
            raise RuntimeError("the tree could not be ranked")
        totals: list[float] = self._given.tolist()
        return totals

    def depth(self, width: int) -> int:
        """Depth of the subtree of the best ``width`` nodes; ``width`` is one of the verify widths."""
        deepest: int = self._deepest[self._indices[width]]
        return deepest

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Nodes from best to worst, [N]."""
        return self._order.read()

    def _rank_portably(self) -> int:
        scores, depths, order = self._buffers
        best, nodes = scores.sort(descending=True, stable=True)
        order.copy_(nodes)
        levels = torch.where(best.isfinite(), depths[nodes], 0).cummax(0).values
        last = self._widths - 1
        self._totals.copy_(best.double().exp().cumsum(0).cpu()[last])
        self._levels.copy_(levels.cpu()[last])
        return 0


def _write(buffer: Tensor, first: int, rows: Sequence[float] | Sequence[Sequence[bool]]) -> None:
    """Set entries ``first`` onwards. On a CPU straight in its memory: a call of PyTorch's takes as long as ten such."""
    if buffer.device.type == "cpu":
        buffer.numpy()[first : first + len(rows)] = rows
    else:
        buffer[first : first + len(rows)] = torch.tensor(rows, dtype=buffer.dtype)
