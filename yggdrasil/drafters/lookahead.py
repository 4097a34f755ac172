"""Lookahead decoding (arXiv 2402.02057) as drafter: the target's own passes guess several places ahead at once.

Beside the guesses to verify, a tree carries a window of tokens that stand for text to come. What the target says behind
each of its columns is a token more of an n-gram that the target itself made, as in a Jacobi iteration; such n-grams are
kept by their first token, and those that begin with the root are the next guesses. In the tree the window is a chain,
the oldest level, with a branch below each of its nodes, that column's later levels.

The window's rows can hardly stand themselves. They are worth what their n-grams bring later, which is measured, so
whoever chooses rows by what they are worth prices them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice

from torch import Tensor

from yggdrasil.drafters.options import LookaheadOptions
from yggdrasil.tree.token_tree import TokenTree

_MEMORY = 256.0  # guesses, and rows of the window, after which older ones count half
_MOST_LIKELY = 0.95
_KEPT = 16  # n-grams that begin alike


class LookaheadDrafter:
    """A free drafter that reads what the target says behind every verified node."""

    name = "lookahead"

    def __init__(self, options: LookaheadOptions | None = None) -> None:
        self.options = options or LookaheadOptions()
        size = self.options.max_ngram_size
        self._rates = [_Rate(1.0, 4.0) for _ in range(size - 1)]  # that a guess's next token stands, by place
        self._credit = _Rate(1.0, 16.0)  # tokens that n-grams of the window brought, a row of it
        self._begin()

    def begin(self, tokens: Sequence[int]) -> None:
        self._begin()
        self._read(tokens)

    def _begin(self) -> None:
        self._text: list[int] = []
        # First token -> what followed, the newest last, and whether the window made it before the text did.
        self._pool: dict[int, dict[tuple[int, ...], bool]] = {}
        self._window: list[list[int]] = []  # levels, the oldest first; empty until there is text to fill it with
        self._seen: dict[tuple[int, ...], int] = {}  # path below the root -> what the target said behind it
        self._guesses: list[tuple[int, ...]] = []

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        self._grade(tokens)
        if self._window:
            self._advance(len(tokens))
        self._read(tokens)
        self._seen, self._guesses = {}, []

    def _read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
            self._keep(self._text[-self.options.max_ngram_size :], is_ahead=False)

    def plant(self, tree: TokenTree, depth: int) -> None:
        tree.plant(self._text[-1])
        self.fill(tree, depth)

    def fill(self, tree: TokenTree, depth: int) -> None:
        newest = reversed(self._pool.get(self._text[-1], {}))
        self._guesses = list(islice(newest, self.options.max_verification_set_size))
        for rank, guess in enumerate(self._guesses):
            edges = [math.log(rate.value) for rate in self._rates]
            edges[0] -= rank * math.log(2)  # of those that begin alike the first one's edge stays
            tree.graft(range(len(guess[:depth])), guess[:depth], edges[: len(guess[:depth])])
        if not self._window:
            self._window = [self._filler(level) for level in range(self.options.max_ngram_size - 1)]
        self._graft_window(tree, depth)

    def read(self, tree: TokenTree, nodes: Sequence[int], choices: Sequence[int]) -> None:
        """The target chose ``choices[i]`` behind ``nodes[i]``, parents first, whether that stands or not."""
        parents, tokens, scores = tree.parents.tolist(), tree.tokens.tolist(), tree.scores.tolist()
        # A tree that another drafter grew may be verified before this one has added to any.
        window = [self._paths(column) for column in range(self.options.max_window_size)] if self._window else []
        columns = {path[-1] for path in window}
        size, paths = self.options.max_ngram_size - 1, dict[int, tuple[int, ...]]()
        for node, choice in zip(nodes, choices, strict=True):
            if math.isinf(scores[node]):  # padding
                continue
            path = paths[node] = (*paths[parents[node]], tokens[node]) if node else ()
            self._seen[path] = choice
            self._keep([*[*self._text[-size:], *path][-size:], choice], is_ahead=path in columns)
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
        """What came of the last guesses: ``tokens`` became certain, the last of them without one."""
        if not self._seen or not self._guesses:
            return
        best = max(self._guesses, key=lambda guess: _shared(guess, tokens[:-1]))
        stood = _shared(best, tokens[:-1])
        for place, rate in enumerate(self._rates[: stood + 1]):
            if best[: place + 1] in self._seen:
                rate.add(float(place < stood))
        if self._pool[self._text[-1]].get(best, False):
            self._credit.add(float(stood), tried=0.0)

    # ==== the window ====

    def _filler(self, shift: int) -> list[int]:
        """Tokens to begin with: some of the text, as good as any."""
        return [self._text[(shift + column) % len(self._text)] for column in range(self.options.max_window_size)]

    def _paths(self, column: int) -> list[tuple[int, ...]]:
        """The path below the root of each of the column's nodes."""
        chain, later = tuple(self._window[0][: column + 1]), [level[column] for level in self._window[1:]]
        return [chain + tuple(later[:level]) for level in range(len(later) + 1)]

    def _graft_window(self, tree: TokenTree, depth: int) -> None:
        edge = math.log(self._credit.value)
        for column in range(self.options.max_window_size):
            path = self._paths(column)[-1][:depth]
            tree.graft(range(len(path)), path, [edge, *[0.0] * (len(path) - 1)])

    def _advance(self, count: int) -> None:
        """``count`` more tokens are certain; each level becomes the one before it where the target said a new one."""
        whole = [self._paths(column)[-1] for column in range(self.options.max_window_size)]
        if all(path in self._seen for path in whole):
            self._window = [*self._window[1:], [self._seen[path] for path in whole]]
            count -= 1
        for shift, level in enumerate(self._window):
            level[:] = [*level[count:], *self._filler(shift + count)][: self.options.max_window_size]


class _Rate:
    """How often something came of a try; older tries count less."""

    def __init__(self, came: float, tried: float) -> None:
        self.came, self.tried = came, tried

    @property
    def value(self) -> float:
        return min(max(self.came / self.tried, 1e-4), _MOST_LIKELY)

    def add(self, came: float, tried: float = 1.0) -> None:
        """One more."""
        if self.tried >= _MEMORY:
            self.came, self.tried = self.came / 2, self.tried / 2
        self.came, self.tried = self.came + came, self.tried + tried


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
