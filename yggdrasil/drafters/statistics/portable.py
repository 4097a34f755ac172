"""Counted contexts in Python: what `features.h` and `counts.h` (``native``) do natively, without a compiler.

A context's continuations are kept by count, the newer first among equals. The features of a candidate are how often it
followed each context (of the text and of the table) that ends at the last token, and its rank among the target's last
runners-up after that token. The n-gram scorer (`scorer.py`) turns them into probabilities. Trees are grown best first:
nodes come in falling order of score, and the first n of them are the best tree of n nodes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.drafters.statistics.best_first import EarlyStopping, Guess, Nodes, OpenGuesses, offered, shares
from yggdrasil.policy.objective import UNBOUNDED, StoppingBound

MAX_CONTINUATIONS = 16  # of a context of the text that are looked at
MOST_LIKELY = 0.98  # of all children together: none is certain
LEAST_PATH = -6.2  # log-probability of a node below which no pass verifies it, until the costs of a plan say so
LONGEST = 6  # tokens of the longest context of the text
TABLE_LENGTH = 3  # tokens of the longest context of a table
NUM_CONTEXTS = LONGEST + TABLE_LENGTH
HIDDEN = 16  # units of a scorer
RUNNERS_UP = 8  # of a token that are kept at most
_BITS = 21  # of a token in a context's key
MOST_TOKEN = (1 << _BITS) - 2

Tokens = TypeVar("Tokens", int, npt.NDArray[np.int64])


class ContextCounts(NamedTuple):
    """How often each candidate has followed the contexts at the end of a text.

    Dims: K contexts, those of the text from one token on and then those of the table.
    """

    seen: list[int]  # [K] how often each was
    followed: dict[int, list[int]]  # how often each candidate has followed each of them, [K]
    places: dict[int, int]  # of candidates among the runners-up, from 1 on


class Continuations:
    """Continuations of one context, by count."""

    def __init__(self) -> None:
        self.total = 0
        self.ranked: list[tuple[int, int]] = []  # (token, count)

    def add(self, token: int) -> None:
        """``token`` has followed once more."""
        self.total += 1
        place = next((i for i, (known, _) in enumerate(self.ranked) if known == token), None)
        seen = 1 if place is None else self.ranked.pop(place)[1] + 1
        first = next((i for i, (_, other) in enumerate(self.ranked) if other <= seen), len(self.ranked))
        self.ranked.insert(first, (token, seen))


class PortableStatistics:
    """The interface of the native ``Counts``."""

    def __init__(self, *weights: Tensor) -> None:
        shapes = [tuple(each.shape) for each in weights]
        of_features = [(NUM_CONTEXTS, 2, HIDDEN), (NUM_CONTEXTS, HIDDEN), (1 + RUNNERS_UP, HIDDEN)]
        if shapes != [*of_features, (HIDDEN,), (HIDDEN,), (1,)]:
            raise RuntimeError("weights are not those of a scorer")
        self._least_path = LEAST_PATH
        self._weights = [each.numpy() for each in weights]
        self._recycled: dict[int, list[int]] = {}  # token -> its runners-up the last time, best first
        self._text: list[int] = []
        self._contexts: dict[tuple[int, ...], Continuations] = {}
        self._table: dict[int, Continuations] = {}
        self._bed: tuple[Tensor, ...] = ()  # buffers of the tree that is grown
        self._given: tuple[Tensor, ...] = ()  # of one that a drafter grows, with its pool

    def set_table(self, keys: Tensor, totals: Tensor, starts: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Contexts of one to three tokens, as ``Table`` keeps them."""
        continuations, places = list(zip(tokens.tolist(), counts.tolist(), strict=True)), starts.tolist()
        self._table.clear()
        for i, (key, total) in enumerate(zip(keys.tolist(), totals.tolist(), strict=True)):
            entry = self._table[key] = Continuations()
            entry.total, entry.ranked = total, continuations[places[i] : places[i + 1]]

    def recycle(self, tokens: Sequence[int], continuations: Tensor) -> None:
        """After ``tokens[i]`` the target found ``continuations[i]`` likeliest, best first."""
        if continuations.ndim != 2 or len(continuations) != len(tokens) or continuations.shape[1] > RUNNERS_UP:
            raise RuntimeError(f"runners-up must be [tokens, {RUNNERS_UP}] at most")
        self._recycled.update(zip(tokens, continuations.tolist(), strict=True))

    def forget(self) -> None:
        """Another text begins."""
        self._recycled.clear()
        self._contexts.clear()
        self._text.clear()

    def append(self, tokens: Sequence[int]) -> None:
        """More tokens are certain."""
        for token in tokens:
            end = len(self._text)
            for length in range(1, min(LONGEST, end) + 1):
                self._contexts.setdefault(tuple(self._text[end - length :]), Continuations()).add(token)
            self._text.append(token)

    def leave_out_below(self, score: float) -> None:
        """Grow no node whose path has a log-probability below ``score``."""
        self._least_path = score

    def features(self, path: Sequence[int]) -> Tensor:
        """Counts of the candidates behind ``path``, [n, 2 + 2 K] int64.

        Rows: token, place among the runners-up (0: none), how often it followed each context, how often each was seen.
        """
        seen, followed, places = self._gather(list(path))
        rows = [[token, places.get(token, 0), *counts, *seen] for token, counts in followed.items()]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2 + 2 * NUM_CONTEXTS)

    def grow_in(self, *buffers: Tensor) -> None:
        """Set the buffers of the tree to grow: tokens, parents, depths, scores, edges, ancestors."""
        self._bed = buffers

    def grow(self, certain: Sequence[int], depth: int, bound: StoppingBound = UNBOUNDED) -> int:
        """Count ``certain`` tokens, plant the text's last one, grow a tree as deep as ``depth`` and ``bound`` want."""
        self.append(certain)
        nodes = self._nodes(*self._bed)
        nodes.put(Guess(0.0, -1, 0.0, 0, self._text[-1]))
        open_guesses = OpenGuesses()
        self._open_children(nodes, 0, 0.0, depth, open_guesses)
        stopping = EarlyStopping(bound)
        stopping.add(0.0)
        return self._complete(nodes, depth, open_guesses, stopping)

    def fill_in(self, *buffers: Tensor) -> None:
        """Set the buffers of the drafted tree to extend: as for ``grow_in``, then the pool's tokens and scores."""
        self._given = buffers

    def fill(self, depth: int, bound: StoppingBound = UNBOUNDED) -> int:
        """Extend a tree that another drafter has grown below the text's last token; returns its size.

        Free nodes take the best continuations, down to ``depth`` levels, until ``bound`` ends it. Below a node that the
        drafter has read, whose candidates are in the pool then, both estimates are averaged, each weighted by the sum
        of its probabilities. Elsewhere the higher estimate of a token counts.
        """
        *buffers, pool_tokens, pool_scores = self._given
        tokens, scores = buffers[0], buffers[3]
        nodes = self._nodes(*buffers)
        nodes.read()
        drafted = [nodes.score(node) for node in range(nodes.size)]
        falls = [score - drafted[nodes.parent(node)] for node, score in enumerate(drafted)]
        open_guesses = OpenGuesses()
        for node in range(nodes.size):  # parents come first
            if math.isinf(falls[node]) or math.isnan(falls[node]):
                continue
            if node:
                scores[node] = nodes.score(nodes.parent(node)) + falls[node]
            if nodes.score(node) < self._least_path:
                continue
            ours = dict(self._likely(self._behind(nodes.paths[node])))
            children = [c for c in range(1, nodes.size) if nodes.parent(c) == node and math.isfinite(falls[c])]
            theirs = offered(pool_tokens, pool_scores, node, nodes.capacity, drafted[node])
            candidates = pool_tokens.numel() // nodes.capacity
            is_read = bool(theirs) or (1 < candidates <= len(children))  # or all that it keeps is attached
            for child in children:  # others may have attached what it says
                theirs.pop(int(tokens[child]), None)
            share = 0.0
            if is_read:
                known = min(sum(theirs.values()) + sum(math.exp(falls[child]) for child in children), 1.0)
                share = known / (known + min(sum(ours.values()), 1.0))
            left = MOST_LIKELY
            for child in children:
                same, said = min(ours.pop(int(tokens[child]), 0.0), MOST_LIKELY), math.exp(falls[child])
                both = share * said + (1 - share) * same if is_read else max(said, same)
                falls[child] = math.log(min(both, MOST_LIKELY))
                left -= math.exp(falls[child])
            likely = {token: (1 - share) * probability for token, probability in ours.items()}
            for token, probability in theirs.items():
                likely[token] = likely.get(token, 0.0) + share * probability
            if len(nodes.paths[node]) < depth:
                open_guesses.add(node, nodes.score(node), shares(list(likely.items()), left))
        standing = [score for node in range(nodes.size) if math.isfinite(score := nodes.score(node))]
        return self._complete(nodes, depth, open_guesses, EarlyStopping(bound, standing))

    def _nodes(self, *buffers: Tensor) -> Nodes:
        if not self._text:
            raise RuntimeError("no text to grow a tree from")
        return Nodes(*buffers)

    def _complete(self, nodes: Nodes, depth: int, open_guesses: OpenGuesses, stopping: EarlyStopping) -> int:
        """Attach the best of the open guesses and what follows them, until the tree is full; returns its size."""
        while nodes.size < nodes.capacity and (guess := open_guesses.best) is not None:
            if -guess.cost < self._least_path or stopping.is_over(-guess.cost):
                break
            open_guesses.pop()
            nodes.put(guess)
            stopping.add(-guess.cost)
            self._open_children(nodes, nodes.size - 1, -guess.cost, depth, open_guesses)
        nodes.clear()
        return nodes.size

    def _open_children(self, nodes: Nodes, node: int, score: float, depth: int, open_guesses: OpenGuesses) -> None:
        path = nodes.paths[node]
        if len(path) < depth:
            open_guesses.add(node, score, shares(self._likely(self._behind(path)), MOST_LIKELY))

    def _behind(self, path: list[int]) -> list[int]:
        """The last tokens of the text and ``path``."""
        return [*self._text[-LONGEST:], *path][-LONGEST:]

    def _likely(self, path: list[int]) -> list[tuple[int, float]]:
        """All candidates after ``path`` with their probabilities, in the order of their features."""
        counts, totals, recycled, bias, out, nothing = self._weights
        seen, followed, places = self._gather(path)
        if not followed:
            return []
        base = bias.copy()
        for context, total in enumerate(seen):
            if total:
                base += totals[context] * math.log1p(total)
        numbers = []
        for token, times in followed.items():
            hidden = base + recycled[places.get(token, 0)]
            for context, count in enumerate(times):
                if count:
                    share = count / seen[context]
                    hidden += counts[context, 0] * math.log1p(count) + counts[context, 1] * share
            numbers.append(float(out @ np.maximum(hidden, 0.0)))
        most = max(*numbers, float(nothing[0]))
        likely = [math.exp(number - most) for number in numbers]
        whole = sum(likely) + math.exp(float(nothing[0]) - most)
        # As float32: sums that are added up otherwise, as the native form does, come to the same.
        return [(token, float(np.float32(each / whole))) for token, each in zip(followed, likely, strict=True)]

    def _gather(self, path: list[int]) -> ContextCounts:
        """Candidates come in the order of the longest context that they have followed, first the text's."""
        found = ContextCounts([0] * NUM_CONTEXTS, {}, {})
        for length in range(min(LONGEST, len(path)), 0, -1):
            _add(found, length - 1, self._contexts.get(tuple(path[-length:])), MAX_CONTINUATIONS)
        for length in range(min(TABLE_LENGTH, len(path)), 0, -1):
            _add(found, LONGEST + length - 1, self._table.get(table_key(path[-length:])))
        for place, token in enumerate(self._recycled.get(path[-1], ()) if path else (), start=1):
            found.followed.setdefault(token, [0] * NUM_CONTEXTS)
            found.places[token] = place
        return found


def _add(found: ContextCounts, context: int, continuations: Continuations | None, most: int | None = None) -> None:
    if continuations is None:
        return
    found.seen[context] = continuations.total
    for token, count in continuations.ranked[:most]:
        found.followed.setdefault(token, [0] * NUM_CONTEXTS)[context] = count


def table_key(context: Sequence[Tokens]) -> Tokens:
    """A context of one to three tokens, none above ``MOST_TOKEN``, as one number; of arrays those of many contexts."""
    key = context[0] + 1
    for token in context[1:]:
        key = key << _BITS | token + 1
    return key


def has_one_token(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of these keys are contexts of one token: every counted token follows just one of them."""
    found: npt.NDArray[np.bool_] = keys < 1 << _BITS
    return found


def is_longest(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of these keys are contexts of as many tokens as there are."""
    found: npt.NDArray[np.bool_] = keys >= 1 << _BITS * (TABLE_LENGTH - 1)
    return found
