"""The token tree of one iteration, in static buffers.

Node 0 is the root: the last committed token. Nodes are numbered in the order in which they are attached, so a parent
precedes its children. Buffers are allocated once and written in place, since compiled steps hold their addresses.

Dims: N node capacity, K candidates per node, P = N*K pool entries, W attached nodes, V vocabulary.

In an Equal-Growth Tree (paper section 4.2) every draft step attaches exactly W nodes, anywhere in the tree. Functions
for these steps write the buffers in place by tensor operations without data-dependent branches or shapes, so they can
be traced into the drafter's compiled steps. A chain is the case W = 1.
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

import yggdrasil.native  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.native import is_native
from yggdrasil.native.direct import direct, native_ranking
from yggdrasil.native.portable import reweighed
from yggdrasil.runtime.passes import HostView

NO_SCORE = float("-inf")
CONSIDERED = 16  # CONSIDERED * K candidates of a node are compared by their random draws if the target samples
MIN_LOG_PROBABILITY = -12.0
MIN_DESCENT = -1e-4  # largest score difference of a host-attached node to its parent; keeps prefixes by score connected


@dataclass(frozen=True)
class TokenTree:
    """Nodes of one tree, and a pool of candidates that may become nodes. Entries without a finite score are empty."""

    tokens: Tensor  # [N] int64
    parents: Tensor  # [N] int64, the root's is 0
    depths: Tensor  # [N] int64, the root's is 0
    scores: Tensor  # [N] float32, log of the estimated probability that the path is accepted; root 0
    edges: Tensor  # [N] float32, the drafter's log-probability of the token given its parent; root 0
    ancestors: Tensor  # [N, N] bool, row i marks the path from the root to i, both included
    pool_scores: Tensor  # [P] float32, score that a candidate would have as a node; -inf if attached or absent
    pool_edges: Tensor  # [P] float32, the drafter's log-probability of the candidate given its node
    pool_tokens: Tensor  # [P] int64; the candidates of node i are entries i*K .. i*K+K-1
    draws: Tensor | None = None  # [2] int64: key of the target's random draws, index of the root in the text
    draw_weights: Tensor | None = None  # [3] float32, see ``reweighed``; zeros for a greedy target

    @classmethod
    def allocate(cls, num_nodes: int, candidates: int, device: torch.device) -> "TokenTree":
        """Allocate a tree for ``num_nodes`` nodes, root included, with ``candidates`` entries per node in its pool.

        The tree has no node, not even a root, until ``plant`` or ``plant_root`` is called.

        Raises:
            ValueError: either number is below 1.
        """
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
            draws=integers(2),
            draw_weights=floats(3, 0.0),
        )

    @classmethod
    def on_host(cls, num_nodes: int, candidates: int = 1) -> "TokenTree":
        """Allocate a tree on the host. One candidate per node suffices for model-free drafts, which use no pool."""
        with torch.inference_mode(False):  # buffers made in inference mode could not be written outside it
            return cls.allocate(num_nodes, candidates, torch.device("cpu"))

    @property
    def num_nodes(self) -> int:
        """N, the most nodes that the tree can hold, root included; ``size`` is the number of nodes that it holds."""
        return self.tokens.shape[0]

    @property
    def candidates(self) -> int:
        """K, the number of entries per node in the pool of candidates."""
        return self.pool_tokens.shape[0] // self.tokens.shape[0]

    def node_tensors(self) -> list[Tensor]:
        """Return the node buffers, not copies: tokens, parents, depths, scores, edges, ancestors."""
        return [self.tokens, self.parents, self.depths, self.scores, self.edges, self.ancestors]

    def tensors(self) -> list[Tensor]:
        """Return the buffers, not copies: those of ``node_tensors``, then pool_scores, pool_edges, pool_tokens.

        Compiled steps that do not add candidates take them in this order.
        """
        return [*self.node_tensors(), self.pool_scores, self.pool_edges, self.pool_tokens]

    def draft_tensors(self) -> list[Tensor]:
        """Return the buffers of ``tensors``, then draws, draw_weights: the inputs of steps that add candidates."""
        assert self.draws is not None
        assert self.draw_weights is not None
        return [*self.tensors(), self.draws, self.draw_weights]

    def take_nodes(self, other: "TokenTree") -> None:
        """Copy the node buffers of ``other``, a tree of the same capacity, into the node buffers of this tree.

        The pool and the draws of this tree do not change. Buffers keep their addresses, which compiled steps hold.
        """
        for ours, theirs in zip(self.node_tensors(), other.node_tensors(), strict=True):
            ours.copy_(theirs)

    def root_guesses(self) -> Tensor:
        """Return the drafter's log-probabilities of the root's candidates, [K] float32 on the CPU; -inf where absent.

        The log-probabilities descend. Call this before the tree grows, because candidates that became nodes are absent.
        """
        first = slice(self.candidates)
        return torch.where(torch.isfinite(self.pool_scores[first]), self.pool_edges[first], NO_SCORE).cpu()

    def plant(self, token: int) -> None:
        """Remove all nodes and candidates of the tree, and make the token id ``token`` its root.

        Drafters on the host call this; compiled steps call ``plant_root``.
        """
        self.scores.fill_(NO_SCORE)
        self.pool_scores.fill_(NO_SCORE)
        self.ancestors.copy_(torch.eye(self.num_nodes, dtype=torch.bool, device=self.tokens.device))
        for buffer in (self.parents, self.depths, self.edges):
            buffer[0] = 0
        self.tokens[0] = token
        self.scores[0] = 0.0

    def attach(self, parent: int, token: int, log_probability: float) -> int:
        """Add a node with the token id ``token`` below the node ``parent``, and return its index.

        Drafters on the host call this; compiled steps call ``attach_best``.

        Args:
            log_probability: estimated log-probability, at most 0, that ``token`` follows its parent.

        Raises:
            ValueError: the tree is full, the parent is unknown or has a child with this token, or ``log_probability``
                is positive or NaN.
            TypeError: ``token`` is no integer.
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
        """Merge another tree, drafted on the host, into this one below the root, and return the number of nodes added.

        A node that this tree has already is not added, and keeps its score. If the tree is full, the next node to add
        and all given nodes after it are dropped.

        Args:
            parents: for each given node, 0 if it is a child of the root, or j + 1 if it is a child of the given node j.
            tokens: token ids of the given nodes.
            log_probabilities: log-probability of each token given its parent, at most 0.

        Raises:
            ValueError: a parent does not precede its child, a log-probability is positive, or the arguments differ in
                length; nothing is written then.
        """
        scores = [score for score in self.scores.tolist() if math.isfinite(score)]
        size = len(scores)
        above, labels = self.parents.tolist()[:size], self.tokens.tolist()[:size]
        children = {(above[node], labels[node]): node for node in range(1, size)}
        depths, edges = self.depths.tolist()[:size], [0.0] * size
        nodes = [0]  # node numbers in this tree of the root and each given node
        for parent, token, log_probability in zip(parents, tokens, log_probabilities, strict=True):
            if not 0 <= parent < len(nodes):
                raise ValueError(f"node {len(nodes)} has the parent {parent}, which does not come before it")
            if not log_probability <= 0:
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
        """Return the row [N] of ``node`` in ``ancestors``. ``parents[i]`` is the parent of node i."""
        marks = [False] * self.num_nodes
        marks[0] = True
        while node:
            marks[node] = True
            node = parents[node]
        return marks

    @property
    def size(self) -> int:
        """Number of nodes in the tree, root included."""
        return int(torch.isfinite(self.scores).sum())

    def path(self, node: int) -> list[int]:
        """Return the indices of the nodes from the root to ``node``, both included."""
        return torch.nonzero(self.ancestors[node]).flatten().tolist()


class Ranking:
    """Ranking of one tree's nodes by descending score, ties by ascending index; ``rank`` computes it.

    Args:
        verify_widths: the V widths for which expected tokens and depths are computed.
        order: [N] int64 buffer that receives the ranking, allocated by default.

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
        self._given: Any = self._totals.numpy().data  # a memoryview: its tolist is faster than the array's
        self._deepest: memoryview = self._levels.numpy().data
        self._indices = {width: index for index, width in enumerate(verify_widths)}
        self._rank: Callable[[], int] = self._rank_portably
        if device.type == "cpu" and is_native():
            self._native = native_ranking(*self._buffers, self._widths, self._totals, self._levels)
            self._rank = direct("rank", self._native)

    def rank(self) -> list[float]:
        """Rank the tree's nodes by score; ``depth`` and ``order`` return facts of the last ranking.

        Returns:
            For each verify width, in the order given to the constructor, the expected number of tokens that a pass over
                so many of the best nodes gives, bonus token included.

        Raises:
            RuntimeError: the native library failed.
        """
        if self._rank() < 0:
            raise RuntimeError("the tree could not be ranked")
        totals: list[float] = self._given.tolist()
        return totals

    def depth(self, width: int) -> int:
        """Return the depth of the subtree of the ``width`` best nodes in the last ranking; the root alone has depth 0.

        ``width`` must be one of the verify widths.
        """
        deepest: int = self._deepest[self._indices[width]]
        return deepest

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Node indices by descending score in the last ranking, [N] int64. Entries that hold no node come last."""
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
    """Copy ``rows`` to ``buffer`` from index ``first`` on. On a CPU, NumPy is 10x faster than a PyTorch call."""
    if buffer.device.type == "cpu":
        buffer.numpy()[first : first + len(rows)] = rows
    else:
        buffer[first : first + len(rows)] = torch.tensor(rows, dtype=buffer.dtype)


def calibrated(log_probability: Tensor, knots: Tensor) -> Tensor:
    """Map a drafter's log-probabilities, of any shape, to estimated log-probabilities of acceptance.

    Args:
        knots: [M] float32 results for M equally spaced log-probabilities from -12 to 0, with linear interpolation.
            Arguments outside this range are clamped. All results are below 0, so a child's score is below its parent's.
    """
    last = knots.shape[0] - 1
    position = (log_probability.clamp(MIN_LOG_PROBABILITY, 0.0) - MIN_LOG_PROBABILITY) * (last / -MIN_LOG_PROBABILITY)
    low = position.floor().clamp(max=last - 1)
    index = low.to(torch.int64)
    fraction = position - low
    return knots[index] * (1 - fraction) + knots[index + 1] * fraction


def plant_root(tree: TokenTree, token: Tensor) -> None:
    """Remove all nodes and candidates of the tree, and make ``token`` ([1] int64 token id) its root."""
    tree.scores.fill_(NO_SCORE)
    tree.scores[:1] = 0.0
    tree.pool_scores.fill_(NO_SCORE)
    tree.tokens[:1] = token
    tree.parents[:1] = 0
    tree.depths[:1] = 0
    tree.edges[:1] = 0.0
    tree.ancestors.copy_(torch.eye(tree.num_nodes, dtype=torch.bool, device=token.device))


def offer_candidates(tree: TokenTree, nodes: Tensor, logits: Tensor, knots: Tensor) -> None:
    """Add to the tree's pool, for each of ``nodes``, the K next tokens that are likeliest to be accepted.

    Args:
        nodes: [W] int64 node indices.
        logits: [W, V] logits of the drafter for the token after each of these nodes.
        knots: [M] float32 acceptance calibration, see ``calibrated``.
    """
    edges, tokens = likeliest(logits, num_considered(tree, logits.shape[-1]))
    offer(tree, nodes, edges, tokens, knots)


def num_considered(tree: TokenTree, most: int) -> int:
    """Return how many of a node's likeliest tokens to ``offer``: K, or C = min(CONSIDERED * K, ``most``).

    It is K without ``draw_weights``, and on a CPU for a greedy target or in a traced step. Otherwise it is C.
    """
    weights = tree.draw_weights
    if weights is None or (weights.is_cpu and not (type(weights) is Tensor and _may_sample(weights))):
        return tree.candidates
    return min(CONSIDERED * tree.candidates, most)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` likeliest tokens of each row of ``logits`` [W, V], the likeliest first.

    Returns:
        Log-probabilities float32 and token ids int64, [W, count] each. A row with NaN gets the log-probability -12.
    """
    logits = logits.float()
    top, tokens = torch.ops.yggdrasil.top_candidates(logits, count)
    edges = top - logits.logsumexp(-1, keepdim=True)
    edges = torch.where(edges.isnan(), MIN_LOG_PROBABILITY, edges)  # NaN from a damaged drafter
    return edges, tokens


def offer(tree: TokenTree, nodes: Tensor, edges: Tensor, tokens: Tensor, knots: Tensor) -> None:
    """Write the best K of C candidates below each of ``nodes`` to the tree's pool.

    A candidate's score is the score of its node plus the log-probability that the candidate is accepted: ``calibrated``
    of the candidate's edge, then ``reweighed`` by the target's random draws if the target samples.

    Args:
        nodes: [W] int64 node indices.
        edges: [W, C >= K] float32, the drafter's log-probabilities of the candidates, descending.
        tokens: [W, C] int64 token ids of the candidates.
        knots: [M] float32 acceptance calibration.
    """
    k, likely = tree.candidates, calibrated(edges, knots)
    if tree.draws is not None and tree.draw_weights is not None and _may_sample(tree.draw_weights):
        reweigh = torch.ops.yggdrasil.reweigh if edges.is_cpu else reweighed  # compiled steps for a GPU fuse it
        likely = reweigh(likely, edges, tokens, tree.depths[nodes], tree.draws, tree.draw_weights)
    if edges.shape[1] > k:
        kept = torch.ops.yggdrasil.top_candidates(likely, k)[1].sort(-1).values  # the likeliest stays first
        likely, edges, tokens = (each.gather(1, kept) for each in (likely, edges, tokens))
    entries = (nodes[:, None] * k + torch.arange(k, device=nodes.device)).flatten()
    tree.pool_scores[entries] = (tree.scores[nodes][:, None] + likely).flatten()
    tree.pool_edges[entries] = edges.flatten()
    tree.pool_tokens[entries] = tokens.flatten()


def _may_sample(draw_weights: Tensor) -> bool:
    """Return False if ``draw_weights`` show that the target is greedy, so that random draws change no score; else True.

    The weights cannot be read, so the result is True, in steps for a GPU and in steps that are being traced.
    """
    return type(draw_weights) is not Tensor or not draw_weights.is_cpu or bool(draw_weights.numpy()[0])


def attach_best(tree: TokenTree, first: Tensor, width: int) -> Tensor:
    """Move the ``width`` candidates with the highest scores from the tree's pool to its nodes from ``first`` on.

    ``first`` is [1] int64. Returns the nodes' indices, [W] int64. If the pool has fewer candidates, the remaining
    entries get the score -inf, so that they hold no node.
    """
    best, indices = torch.ops.yggdrasil.top_candidates(tree.pool_scores[None], width)
    scores, entries = best[0], indices[0]
    parents = entries // tree.candidates
    nodes = first + torch.arange(width, device=first.device)
    tree.tokens[nodes] = tree.pool_tokens[entries]
    tree.edges[nodes] = tree.pool_edges[entries]
    tree.parents[nodes] = parents
    tree.depths[nodes] = tree.depths[parents] + 1
    tree.scores[nodes] = scores
    itself = nodes[:, None] == torch.arange(tree.num_nodes, device=nodes.device)
    tree.ancestors[nodes] = tree.ancestors[parents] | itself
    tree.pool_scores[entries] = NO_SCORE
    return nodes


def rank_nodes(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """Rank a tree's nodes by descending score.

    A child's score is below its parent's, so every prefix of the ranking is the best connected subtree of its size; the
    dynamic programme of paper section 4.2 is not needed.

    Returns:
        Node indices, [N] int64, and expected tokens, [N] float32: entry i is for a pass over the first i + 1 nodes,
            bonus token included.
    """
    order, expected = torch.empty_like(tree.tokens), torch.empty_like(tree.scores)
    torch.ops.yggdrasil.rank_nodes(tree.scores, order, expected)
    return order, expected
