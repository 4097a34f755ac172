"""Best-first growth of a token tree: its nodes, the queue of candidates, and early stopping."""

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import count as numbers
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.policy.objective import StoppingBound
from yggdrasil.tree.token_tree import NO_SCORE

BRANCHES = 8  # the most children per node
LEAST_LIKELY = 1e-6
_ROUNDING = 1.0 + 1e-6  # tolerance, because scores are float32


class Guess(NamedTuple):
    """A candidate node. Ordered by cost (negative log-probability of its path), then by insertion."""

    cost: float
    serial: int  # number in the order of insertion
    edge: float  # log-probability of the token given its parent
    parent: int  # index of a tree node
    token: int


class OpenGuesses:
    """Priority queue of candidate nodes."""

    def __init__(self) -> None:
        self._guesses: list[Guess] = []
        self._serial = numbers()

    @property
    def best(self) -> Guess | None:
        """The candidate with the highest score; None if the queue is empty."""
        return self._guesses[0] if self._guesses else None

    def pop(self) -> None:
        """Remove the candidate with the highest score from the queue, which must not be empty."""
        heapq.heappop(self._guesses)

    def add(self, node: int, score: float, children: Sequence[tuple[float, int]]) -> None:
        """Add candidates below a tree node to the queue.

        Args:
            node: index of the node.
            score: log-probability of the node's path.
            children: (log-probability, token id) of each candidate.
        """
        for edge, token in children:
            heapq.heappush(self._guesses, Guess(-score - edge, next(self._serial), edge, node, token))


class Nodes:
    """The node buffers of a token tree, and each node's path: the token ids from below the root to the node."""

    def __init__(
        self, tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, edges: Tensor, ancestors: Tensor
    ) -> None:
        self._buffers = tokens, parents, depths, scores, edges, ancestors
        self.paths: list[list[int]] = []
        self.capacity = tokens.numel()

    @property
    def size(self) -> int:
        """Number of tree nodes written, root included."""
        return len(self.paths)

    def read(self) -> None:
        """Fill ``paths`` and ``size`` from the nodes that the tree's buffers hold already."""
        tokens, parents, _, scores, _, _ = self._buffers
        size = 1 + int(torch.isfinite(scores).nonzero().max())
        for node in range(size):
            self.paths.append([*self.paths[int(parents[node])], int(tokens[node])] if node else [])

    def score(self, node: int) -> float:
        """Return the score of ``node``, the log-probability that its path is accepted."""
        return float(self._buffers[3][node])

    def parent(self, node: int) -> int:
        """Return the index of the parent of ``node`` in the tree."""
        return int(self._buffers[1][node])

    def put(self, guess: Guess) -> None:
        """Write the candidate ``guess`` to the tree's buffers as the next node. The first one is the root."""
        tokens, parents, depths, scores, edges, ancestors = self._buffers
        node = self.size
        self.paths.append([*self.paths[guess.parent], guess.token] if node else [])
        tokens[node], parents[node], edges[node] = guess.token, guess.parent, guess.edge
        depths[node], scores[node] = len(self.paths[node]), -guess.cost
        ancestors[node] = ancestors[guess.parent] if node else False
        ancestors[node, node] = True

    def clear(self) -> None:
        """Give the entries of the tree's buffers from ``size`` on the score -inf: no node exists there.

        Nodes of an earlier tree may be in them.
        """
        self._buffers[3][self.size :] = NO_SCORE
        ancestors = self._buffers[5]
        ancestors[self.size :] = torch.eye(self.capacity, dtype=torch.bool)[self.size :]


class EarlyStopping:
    """Early stopping of growth in falling order of score. ``native/tree`` has the C++ implementation.

    A limit on accepted tokens need not be considered: it only lowers the value of wider passes.

    Args:
        bound: width, base value and value per expected accepted token of each verify width above 1, in one array.
        existing: log-probabilities of nodes that the tree already has. Each is counted before the first new node with
            a lower one.
    """

    def __init__(self, bound: StoppingBound, existing: Iterable[float] = ()) -> None:
        self._wider = list(zip(bound[::3], bound[1::3], bound[2::3], strict=True))
        self._best = -math.inf  # highest objective value of the widths reached so far
        self._size, self._accepted = 0, 0.0  # nodes with the root, their expected accepted tokens
        self._existing = sorted(existing)  # not counted yet, ascending

    def add(self, score: float) -> None:
        """Count a new node whose path has the log-probability ``score``. The first one is the root, with score 0."""
        self._count_existing(score)
        self._count(score)

    def is_over(self, score: float) -> bool:
        """Return whether growth can stop, as no wider pass can gain if all further nodes score at most ``score``.

        ``score`` is the log-probability of the best candidate's path. False until the smallest width of the bound is
        reached; with an empty bound, always.
        """
        self._count_existing(score)
        likely = math.exp(score)
        return self._best > -math.inf and all(
            (base + slope * (self._accepted + (width - self._size) * likely)) * _ROUNDING <= self._best
            for width, base, slope in self._wider
        )

    def _count_existing(self, score: float) -> None:
        while self._existing and self._existing[-1] >= score:
            self._count(self._existing.pop())

    def _count(self, score: float) -> None:
        self._accepted += math.exp(score) if self._size else 0.0
        self._size += 1
        if self._wider and self._size == self._wider[0][0]:
            _, base, slope = self._wider.pop(0)
            self._best = max(self._best, base + slope * self._accepted)


def likeliest_children(candidates: Sequence[tuple[int, float]], left: float) -> list[tuple[float, int]]:
    """Return the most probable candidates, at most eight, as (log-probability, token id), best first.

    Args:
        candidates: pairs (token id, probability).
        left: limit of the sum of their probabilities. The last ones are lowered or left out to keep it.
    """
    children = []
    for token, probability in sorted(candidates, key=lambda candidate: -candidate[1])[:BRANCHES]:
        share = min(probability, left)
        if share < LEAST_LIKELY:
            break
        left -= share
        children.append((math.log(share), token))
    return children


def unattached_candidates(tokens: Tensor, scores: Tensor, node: int, capacity: int, above: float) -> dict[int, float]:
    """Return another drafter's candidates below ``node`` that are not attached: token id -> probability given the node.

    Empty if the drafter did not run the node.

    Args:
        tokens: token ids of the tree's candidate pool.
        scores: scores of the pool, log-probabilities of the candidates' paths.
        capacity: number of nodes for which the tree has room.
        above: score of the node when its candidates were added.
    """
    count = tokens.numel() // capacity
    entries = range(node * count, (node + 1) * count)
    return {int(tokens[i]): math.exp(float(scores[i]) - above) for i in entries if math.isfinite(scores[i])}
