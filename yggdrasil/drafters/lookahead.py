"""Lookahead decoding (arXiv 2402.02057) as drafter: verification passes also generate n-grams for later drafts.

With the drafts to verify, a tree carries the lookahead window: guessed tokens of future positions, refined as in a
Jacobi iteration. The target's token after each column of the window completes an n-gram. N-grams are pooled by their
first token, and those whose first token is the root are drafted. In the tree the window is a chain, its oldest level,
with a branch below each node of the chain, the later levels of that column.

Nodes of the window are rarely accepted themselves. Their score is the measured number of tokens that a window node's
n-grams contribute later; the score of n-grams is their measured acceptance rate. Nodes that no pass would verify at
such a score are not added to the tree.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice, takewhile
from typing import NamedTuple

from torch import Tensor

from yggdrasil.drafters.model_free_options import LookaheadOptions
from yggdrasil.drafters.protocol import Budget, Capabilities, Step
from yggdrasil.drafters.statistics.portable import LEAST_PATH
from yggdrasil.policy.objective import StoppingBound
from yggdrasil.tree.token_tree import TokenTree

_MEMORY = 256.0  # trials after which the weight of earlier ones is halved
_MOST_LIKELY = 0.95
_KEPT = 16  # n-grams per first token


class LookaheadDrafter:
    """Drafter of n-grams that the target's own passes generate. In a group it proposes after the other drafters."""

    name = "lookahead"

    def __init__(self, options: LookaheadOptions | None = None) -> None:
        self.options = options or LookaheadOptions()
        self.capabilities = Capabilities(read_choices=self._read_choices)
        size = self.options.max_ngram_size
        # Acceptance rate of an n-gram's token by its index, relative to the probability that other children leave.
        self._rates = [_Rate(1.0, 4.0) for _ in range(size - 1)]
        self._credit = _Rate(1.0, 16.0)  # accepted tokens from the window's n-grams, per verified window node
        self._begin()

    def begin(self, tokens: Sequence[int]) -> None:
        self._begin()
        self._read(tokens)

    def _begin(self) -> None:
        self._text: list[int] = []
        # First token -> the following tokens, newest last -> whether the n-gram comes from the window, not the text.
        self._pool: dict[int, dict[tuple[int, ...], bool]] = {}
        self._window: list[list[int]] = []  # levels, oldest first; empty if not carried
        self._is_carried = False  # whether the last tree carried the window
        self._seen: dict[tuple[int, ...], int] = {}  # path below the root -> the target's token after it
        self._guesses: list[_Guess] = []

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        self._grade(tokens)
        if self._is_carried:
            self._advance(len(tokens))
        else:
            self._window = []  # reinitialised when a tree carries the window again
        self._read(tokens)
        self._seen, self._guesses, self._is_carried = {}, [], False

    def _read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
            self._keep(self._text[-self.options.max_ngram_size :], is_ahead=False)

    def cost(self, budget: Budget) -> Sequence[Step]:
        return ()

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        depth = budget.depth
        scores = list(takewhile(math.isfinite, tree.scores.tolist()))
        ngrams = self._pool.get(self._text[-1])
        there = _ExtendedTree(tree, scores)
        self._guesses = self._new_guesses(there, ngrams, depth) if ngrams else []
        row, rows = _log(self._credit.value), self.options.max_window_size * (self.options.max_ngram_size - 1)
        least = least_verified_score([*scores, *(guess.score for guess in self._guesses), *[row] * rows], budget.bound)
        least = max(least, LEAST_PATH)  # also for passes whose further rows are free
        for guess in self._guesses:
            if guess.score >= least:
                there.add(guess.path, guess.edges)
        self._is_carried = row >= least
        if self._is_carried:
            self._add_window(there, row, depth)
        there.graft()

    def _new_guesses(self, there: "_ExtendedTree", ngrams: dict[tuple[int, ...], bool], depth: int) -> list["_Guess"]:
        """Return drafts from the newest ``ngrams`` that add nodes to the tree ``there``, at most ``depth`` deep."""
        guesses, ranks = list[_Guess](), dict[int, int]()
        for ngram in islice(reversed(ngrams), self.options.max_verification_set_size):
            node, length = there.follow(ngram)
            path = ngram[:depth]
            if length >= len(path):
                continue
            rank = ranks[node] = ranks.get(node, -1) + 1  # siblings share the residual probability
            left, rates = there.left(node), self._rates[length : len(path)]
            edges = [*[0.0] * length, *(_log(rate.value) for rate in rates)]
            edges[length] = _log(rates[0].value * left / 2**rank)
            guesses.append(_Guess(path, edges, length, left, there.scores[node] + edges[length], ngrams[ngram]))
        return guesses

    def _read_choices(self, tree: TokenTree, nodes: Sequence[int], choices: Sequence[int]) -> None:
        """Record the target's token ``choices[i]`` after each verified node ``nodes[i]``, accepted or not.

        Parents come before their children.
        """
        parents, tokens, scores = tree.parents.tolist(), tree.tokens.tolist(), tree.scores.tolist()
        window = [self._paths(column) for column in range(self.options.max_window_size)] if self._is_carried else []
        columns = {path[-1] for path in window}
        size, paths = self.options.max_ngram_size - 1, dict[int, tuple[int, ...]]()
        text = self._text[-size:]
        for node, choice in zip(nodes, choices, strict=True):
            if math.isinf(scores[node]):  # padding
                continue
            path = paths[node] = (*paths[parents[node]], tokens[node]) if node else ()
            self._keep([*[*text, *path][-size:], choice], is_ahead=path in columns)
            if window:
                self._seen[path] = choice
        if window:
            self._credit.add(0.0, tried=float(sum(path in self._seen for column in window for path in column)))

    # ==== n-grams ====

    def _keep(self, ngram: Sequence[int], *, is_ahead: bool) -> None:
        """Pool ``ngram``, if it has full length, as the newest of its first token."""
        if len(ngram) == self.options.max_ngram_size:
            kept = self._pool.setdefault(ngram[0], {})
            kept[tuple(ngram[1:])] = kept.pop(tuple(ngram[1:]), is_ahead)
            if len(kept) > _KEPT:
                del kept[next(iter(kept))]

    def _grade(self, tokens: Sequence[int]) -> None:
        """Update the acceptance rates from the committed ``tokens``, the last of which is the bonus token."""
        if not self._guesses:
            return
        for place, (rate, token) in enumerate(zip(self._rates, tokens, strict=False)):
            offered = [guess for guess in self._guesses if guess.is_offered(tokens[:place])]
            if not offered:
                continue
            right = [guess for guess in offered if guess.path[place] == token]
            # All of them have the same parent: a node of the tree, or one that they share.
            rate.add(float(bool(right)), tried=offered[0].left if offered[0].length == place else 1.0)
            if place < len(tokens) - 1 and any(guess.is_ahead for guess in right):
                self._credit.add(1.0, tried=0.0)

    # ==== the window ====

    def _filler(self, shift: int) -> list[int]:
        """Return initial tokens of a window level, cyclically from the text."""
        return [self._text[(shift + column) % len(self._text)] for column in range(self.options.max_window_size)]

    def _paths(self, column: int) -> list[tuple[int, ...]]:
        """Return the path below the root of each of the column's nodes."""
        chain, later = tuple(self._window[0][: column + 1]), [level[column] for level in self._window[1:]]
        return [chain + tuple(later[:level]) for level in range(len(later) + 1)]

    def _add_window(self, there: "_ExtendedTree", row: float, depth: int) -> None:
        """Add the window to the tree, its new nodes with the score ``row`` (log-probability) at most."""
        if not self._window:
            self._window = [self._filler(level) for level in range(self.options.max_ngram_size - 1)]
        for column in range(self.options.max_window_size):
            path = self._paths(column)[-1][:depth]
            node, length = there.follow(path)
            fall = min(row - there.scores[node], 0.0)
            there.add(path, [fall if place == length else 0.0 for place in range(len(path))])

    def _advance(self, count: int) -> None:
        """Shift the window by ``count`` committed tokens.

        If every column was verified completely, the oldest level is dropped and the target's tokens become the newest.
        """
        whole = [self._paths(column)[-1] for column in range(self.options.max_window_size)]
        if all(path in self._seen for path in whole):
            self._window = [*self._window[1:], [self._seen[path] for path in whole]]
            count -= 1
        for shift, level in enumerate(self._window):
            level[:] = [*level[count:], *self._filler(shift + count)][: self.options.max_window_size]


class _Guess(NamedTuple):
    """A drafted path below the root, whose first ``length`` tokens are in the tree already."""

    path: tuple[int, ...]
    edges: Sequence[float]  # log-probabilities per token; ignored for existing nodes
    length: int
    left: float  # probability not taken by other children of the first new node's parent
    score: float  # log-probability of the first new node's path
    is_ahead: bool  # whether the n-gram comes from the window

    def is_offered(self, path: Sequence[int]) -> bool:
        """Return whether the draft has a new node directly after ``path``."""
        return self.length <= len(path) < len(self.path) and self.path[: len(path)] == tuple(path)


class _ExtendedTree:
    """A tree on the host with the nodes to add. ``scores`` has both; ``graft`` writes the added nodes at once."""

    def __init__(self, tree: TokenTree, scores: list[float]) -> None:
        self.scores = scores
        self._tree = tree
        self._added: tuple[list[int], list[int], list[float]] = [], [], []  # arguments of graft

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        """Return the node of each (parent, token). Cached, because it is rarely needed."""
        edges = zip(self._tree.parents.tolist(), self._tree.tokens.tolist(), strict=True)
        return {edge: node for node, edge in enumerate(islice(edges, len(self.scores))) if node}

    def add(self, path: Sequence[int], edges: Sequence[float]) -> None:
        """Add a path below the root. ``edges`` of nodes that exist already are ignored."""
        node, length = self.follow(path)
        for token, edge in zip(path[length:], edges[length:], strict=True):
            self._children[node, token] = len(self.scores)
            node, score = len(self.scores), self.scores[node] + edge
            self.scores.append(score)
        parents, tokens, all_edges = self._added
        first = len(tokens)
        parents += [0, *range(first + 1, first + len(path))]
        tokens += path
        all_edges += edges

    def graft(self) -> None:
        """Write all added nodes to the tree in one call."""
        if self._added[0]:
            self._tree.graft(*self._added)

    def left(self, node: int) -> float:
        """Return the probability mass that the children of ``node`` leave."""
        score = self.scores[node]
        taken = [math.exp(self.scores[child] - score) for (above, _), child in self._children.items() if above == node]
        return max(1.0 - sum(taken), 0.0)

    def follow(self, path: Sequence[int]) -> tuple[int, int]:
        """Return (node, length) of the longest prefix of ``path``, from below the root, that is in the tree."""
        node = 0
        for length, token in enumerate(path):
            child = self._children.get((node, token))
            if child is None:
                return node, length
            node = child
        return node, len(path)


class _Rate:
    """A success rate with exponential forgetting."""

    def __init__(self, came: float, tried: float) -> None:
        self.came, self.tried = came, tried

    @property
    def value(self) -> float:
        return self.came / self.tried

    def add(self, came: float, tried: float = 1.0) -> None:
        """Add ``came`` successes of ``tried`` trials."""
        if self.tried >= _MEMORY:
            self.came, self.tried = self.came / 2, self.tried / 2
        self.came, self.tried = self.came + came, self.tried + tried


def least_verified_score(scores: Sequence[float], bound: StoppingBound) -> float:
    """Return the lowest of ``scores`` that the pass with the highest objective value verifies; the lowest if unbounded.

    ``scores`` are log-probabilities of the nodes that a tree could have, including the root's 0.
    """
    best = sorted(scores, reverse=True)
    if not bound:
        return best[-1]
    accepted, last = [total - 1.0 for total in accumulate(map(math.exp, best))], len(best) - 1
    ends = [min(int(width) - 1, last) for width in bound[::3]]
    values = [base + slope * accepted[end] for end, base, slope in zip(ends, bound[1::3], bound[2::3], strict=True)]
    return best[ends[values.index(max(values))]]


def _log(probability: float) -> float:
    return math.log(min(max(probability, 1e-4), _MOST_LIKELY))
