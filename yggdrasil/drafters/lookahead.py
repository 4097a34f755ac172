"""Lookahead decoding (arXiv 2402.02057) as drafter: the target's own passes guess several places ahead at once.

Beside the guesses to verify, a tree carries a window of tokens that stand for text to come. What the target says behind
each of its columns is a token more of an n-gram that the target itself made, as in a Jacobi iteration; such n-grams are
kept by their first token, and those that begin with the root are the next guesses. In the tree the window is a chain,
the oldest level, with a branch below each of its nodes, that column's later levels.

The window's rows are hardly ever accepted themselves. Their score is the measured rate of tokens that their n-grams
bring later, and the score of new n-grams is their measured acceptance. Nodes that no pass would verify at such a score
are not added to the tree.
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

_MEMORY = 256.0  # guesses, and rows of the window, after which older ones count half
_MOST_LIKELY = 0.95
_KEPT = 16  # n-grams that begin alike


class LookaheadDrafter:
    """Reads the token that the target chose after every verified node. It proposes after drafters that know more."""

    name = "lookahead"

    def __init__(self, options: LookaheadOptions | None = None) -> None:
        self.options = options or LookaheadOptions()
        self.capabilities = Capabilities(read_choices=self._read_choices)
        size = self.options.max_ngram_size
        # That a guess's next token stands, by place: of the probability that others have left there.
        self._rates = [_Rate(1.0, 4.0) for _ in range(size - 1)]
        self._credit = _Rate(1.0, 16.0)  # tokens that n-grams of the window brought, a row of it
        self._begin()

    def begin(self, tokens: Sequence[int]) -> None:
        self._begin()
        self._read(tokens)

    def _begin(self) -> None:
        self._text: list[int] = []
        # First token -> what followed, the newest last, and whether the window made it before the text did.
        self._pool: dict[int, dict[tuple[int, ...], bool]] = {}
        self._window: list[list[int]] = []  # levels, the oldest first; empty until a tree carries one
        self._is_carried = False  # by the last tree
        self._seen: dict[tuple[int, ...], int] = {}  # path below the root -> what the target said behind it
        self._guesses: list[_Guess] = []

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        self._grade(tokens)
        if self._is_carried:
            self._advance(len(tokens))
        else:
            self._window = []  # begun anew when a tree carries one again
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
        least = max(least, LEAST_PATH)  # a row that costs nothing still has to be put there
        for guess in self._guesses:
            if guess.score >= least:
                there.add(guess.path, guess.edges)
        self._is_carried = row >= least
        if self._is_carried:
            self._add_window(there, row, depth)
        there.graft()

    def _new_guesses(self, there: "_ExtendedTree", ngrams: dict[tuple[int, ...], bool], depth: int) -> list["_Guess"]:
        """What the newest of ``ngrams`` say that nobody else has."""
        guesses, ranks = list[_Guess](), dict[int, int]()
        for ngram in islice(reversed(ngrams), self.options.max_verification_set_size):
            node, length = there.follow(ngram)
            path = ngram[:depth]
            if length >= len(path):
                continue
            rank = ranks[node] = ranks.get(node, -1) + 1  # of those that begin alike the first one's edge stays
            left, rates = there.left(node), self._rates[length : len(path)]
            edges = [*[0.0] * length, *(_log(rate.value) for rate in rates)]
            edges[length] = _log(rates[0].value * left / 2**rank)
            guesses.append(_Guess(path, edges, length, left, there.scores[node] + edges[length], ngrams[ngram]))
        return guesses

    def _read_choices(self, tree: TokenTree, nodes: Sequence[int], choices: Sequence[int]) -> None:
        """The target chose ``choices[i]`` behind ``nodes[i]``, parents first, whether that stands or not."""
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
        """Keep what followed the first token as the newest."""
        if len(ngram) == self.options.max_ngram_size:
            kept = self._pool.setdefault(ngram[0], {})
            kept[tuple(ngram[1:])] = kept.pop(tuple(ngram[1:]), is_ahead)
            if len(kept) > _KEPT:
                del kept[next(iter(kept))]

    def _grade(self, tokens: Sequence[int]) -> None:
        """What came of the last guesses, verified or not: ``tokens`` became certain, the last of them without one."""
        if not self._guesses:
            return
        for place, (rate, token) in enumerate(zip(self._rates, tokens, strict=False)):
            offered = [guess for guess in self._guesses if guess.is_offered(tokens[:place])]
            if not offered:
                continue
            right = [guess for guess in offered if guess.path[place] == token]
            # All of them hang below the same node: one that was there, or one of theirs.
            rate.add(float(bool(right)), tried=offered[0].left if offered[0].length == place else 1.0)
            if place < len(tokens) - 1 and any(guess.is_ahead for guess in right):
                self._credit.add(1.0, tried=0.0)

    # ==== the window ====

    def _filler(self, shift: int) -> list[int]:
        """Tokens to begin with: some of the text, as good as any."""
        return [self._text[(shift + column) % len(self._text)] for column in range(self.options.max_window_size)]

    def _paths(self, column: int) -> list[tuple[int, ...]]:
        """The path below the root of each of the column's nodes."""
        chain, later = tuple(self._window[0][: column + 1]), [level[column] for level in self._window[1:]]
        return [chain + tuple(later[:level]) for level in range(len(later) + 1)]

    def _add_window(self, there: "_ExtendedTree", row: float, depth: int) -> None:
        """Each of its new nodes has the score ``row``."""
        if not self._window:
            self._window = [self._filler(level) for level in range(self.options.max_ngram_size - 1)]
        for column in range(self.options.max_window_size):
            path = self._paths(column)[-1][:depth]
            node, length = there.follow(path)
            fall = min(row - there.scores[node], 0.0)
            there.add(path, [fall if place == length else 0.0 for place in range(len(path))])

    def _advance(self, count: int) -> None:
        """``count`` more tokens are certain; each level becomes the one before it where the target said a new one."""
        whole = [self._paths(column)[-1] for column in range(self.options.max_window_size)]
        if all(path in self._seen for path in whole):
            self._window = [*self._window[1:], [self._seen[path] for path in whole]]
            count -= 1
        for shift, level in enumerate(self._window):
            level[:] = [*level[count:], *self._filler(shift + count)][: self.options.max_window_size]


class _Guess(NamedTuple):
    """A path below the root whose first ``length`` tokens others have guessed too."""

    path: tuple[int, ...]
    edges: Sequence[float]  # those of nodes that are there already do not matter
    length: int
    left: float  # probability that others have left where the first new node hangs
    score: float  # of that node
    is_ahead: bool  # the window made it

    def is_offered(self, path: Sequence[int]) -> bool:
        """Whether it says something new behind ``path``."""
        return self.length <= len(path) < len(self.path) and self.path[: len(path)] == tuple(path)


class _ExtendedTree:
    """What a tree on the host holds, whose nodes have ``scores``, and what is added to it: at once, by ``graft``."""

    def __init__(self, tree: TokenTree, scores: list[float]) -> None:
        self.scores = scores
        self._tree = tree
        self._added: tuple[list[int], list[int], list[float]] = [], [], []  # as a graft takes them

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        """Nodes by parent and token; most often nobody asks."""
        edges = zip(self._tree.parents.tolist(), self._tree.tokens.tolist(), strict=True)
        return {edge: node for node, edge in enumerate(islice(edges, len(self.scores))) if node}

    def add(self, path: Sequence[int], edges: Sequence[float]) -> None:
        """A path below the root; of its nodes that are there already the ``edges`` do not matter."""
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
        """Write all added nodes in one call."""
        if self._added[0]:
            self._tree.graft(*self._added)

    def left(self, node: int) -> float:
        """Probability that no child of ``node`` has."""
        score = self.scores[node]
        taken = [math.exp(self.scores[child] - score) for (above, _), child in self._children.items() if above == node]
        return max(1.0 - sum(taken), 0.0)

    def follow(self, path: Sequence[int]) -> tuple[int, int]:
        """The last node of ``path``, from below the root, that is there, and how many of its tokens lead to it."""
        node = 0
        for length, token in enumerate(path):
            child = self._children.get((node, token))
            if child is None:
                return node, length
            node = child
        return node, len(path)


class _Rate:
    """How often something came of a try; older tries count less."""

    def __init__(self, came: float, tried: float) -> None:
        self.came, self.tried = came, tried

    @property
    def value(self) -> float:
        return self.came / self.tried

    def add(self, came: float, tried: float = 1.0) -> None:
        """One more."""
        if self.tried >= _MEMORY:
            self.came, self.tried = self.came / 2, self.tried / 2
        self.came, self.tried = self.came + came, self.tried + tried


def least_verified_score(scores: Sequence[float], bound: StoppingBound) -> float:
    """Return the least of ``scores`` that the pass with the highest objective value verifies; without bound the least.

    ``scores`` are log-probabilities of the nodes that a tree could have, the root's 0 among them.
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
