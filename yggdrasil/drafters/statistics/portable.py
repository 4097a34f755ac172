"""N-gram counts in Python, equivalent to the native `features.h` and `counts.h`, for use without a compiler.

Continuations of a context are sorted by count, newer ones first among equals. The features of a candidate are its
counts after each context (of the text and of the table) that ends at the last token. The n-gram scorer (`scorer.py`)
turns features into probabilities. Trees are grown best first: nodes are added in falling order of score, and the first
n are the best tree of n nodes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.drafters.statistics.best_first import (
    EarlyStopping,
    Guess,
    Nodes,
    OpenGuesses,
    likeliest_children,
    unattached_candidates,
)
from yggdrasil.drafters.statistics.draws import Draws
from yggdrasil.policy.objective import UNBOUNDED, StoppingBound

MAX_CONTINUATIONS = 16  # the most continuations considered per context of the text
MOST_LIKELY = 0.98  # the most probability of all children of a node together
LEAST_PATH = -6.2  # least log-probability of a node's path; a plan's costs may raise it
LONGEST = 6  # the most tokens of a context of the text
TABLE_LENGTH = 3  # the most tokens of a context of a table
NUM_CONTEXTS = LONGEST + TABLE_LENGTH
HIDDEN = 16  # hidden units of a scorer
TOKEN_BITS = 21  # bits per token in a context's key
MOST_TOKEN = (1 << TOKEN_BITS) - 2

Tokens = TypeVar("Tokens", int, npt.NDArray[np.int64])


class ContextCounts(NamedTuple):
    """Counts of the candidates after the contexts at the end of a text.

    Dims: K contexts: of the text by ascending length, then of the table by ascending length.
    """

    seen: list[int]  # [K] count of each context
    followed: dict[int, list[int]]  # candidate -> its count after each context, [K]


class Continuations:
    """Continuations of one context, sorted by count."""

    def __init__(self) -> None:
        self.total = 0
        self.ranked: list[tuple[int, int]] = []  # (token, count)

    def add(self, token: int) -> None:
        """Count ``token`` once more among the tokens that followed a context."""
        self.total += 1
        index = next((i for i, (known, _) in enumerate(self.ranked) if known == token), None)
        seen = 1 if index is None else self.ranked.pop(index)[1] + 1
        first = next((i for i, (_, other) in enumerate(self.ranked) if other <= seen), len(self.ranked))
        self.ranked.insert(first, (token, seen))


class PortableStatistics:
    """N-gram counts and tree growth in Python, in place of ``NativeStatistics``; ``weights`` are the scorer's."""

    def __init__(self, *weights: Tensor) -> None:
        shapes = [tuple(each.shape) for each in weights]
        if shapes != [(NUM_CONTEXTS, 2, HIDDEN), (NUM_CONTEXTS, HIDDEN), (HIDDEN,), (HIDDEN,), (1,)]:
            raise RuntimeError("weights are not those of a scorer")
        self._least_path = LEAST_PATH
        self._draws: Draws | None = None
        self._root = 0  # position of the tree's root in its request's text
        self._weights = [each.numpy() for each in weights]
        self._text: list[int] = []
        self._contexts: dict[tuple[int, ...], Continuations] = {}
        self._table: dict[int, Continuations] = {}
        self._grow_buffers: tuple[Tensor, ...] = ()  # buffers of ``grow``
        self._fill_buffers: tuple[Tensor, ...] = ()  # buffers of ``fill``, with the pool

    def set_table(self, keys: Tensor, totals: Tensor, starts: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Set the static n-gram table from the fields of ``Table``.

        Args:
            keys: [C] int64 contexts.
            totals: [C] count of each context.
            starts: [C + 1] index of each context's first continuation.
            tokens: [F] token ids of the continuations.
            counts: [F] their counts.
        """
        continuations, offsets = list(zip(tokens.tolist(), counts.tolist(), strict=True)), starts.tolist()
        self._table.clear()
        for i, (key, total) in enumerate(zip(keys.tolist(), totals.tolist(), strict=True)):
            entry = self._table[key] = Continuations()
            entry.total, entry.ranked = total, continuations[offsets[i] : offsets[i + 1]]

    def forget(self) -> None:
        """Drop the text and its n-gram counts; the static table stays."""
        self._contexts.clear()
        self._text.clear()

    def append(self, tokens: Sequence[int]) -> None:
        """Append committed tokens to the request's text and add them to the n-gram counts."""
        for token in tokens:
            end = len(self._text)
            for length in range(1, min(LONGEST, end) + 1):
                self._contexts.setdefault(tuple(self._text[end - length :]), Continuations()).add(token)
            self._text.append(token)

    def leave_out_below(self, score: float) -> None:
        """Set the least score (log-probability of the path) of nodes in later trees."""
        self._least_path = score

    def follow_draws(self, key: int, noise: float, others: float) -> None:
        """Reweigh candidates of later trees by the random draws of a sampling target.

        ``key`` is the key of the request's noise, ``noise`` the weight of the noise (0 for a greedy target), ``others``
        the log-weight of all tokens that are not candidates.
        """
        self._draws = Draws(key, noise, others) if noise else None

    def features(self, path: Sequence[int]) -> Tensor:
        """Return n-gram counts of the candidates for the token after ``path``, [n, 1 + 2 K] int64.

        Columns: the candidate's id, its count after each of the K = 9 contexts, the count of each context.

        Args:
            path: token ids. The contexts are its last 1 to 6 tokens, counted in the text (16 candidates each at most),
                then its last 1 to 3, counted in the table.
        """
        seen, followed = self._gather(list(path))
        rows = [[token, *counts, *seen] for token, counts in followed.items()]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 1 + 2 * NUM_CONTEXTS)

    def set_grow_buffers(self, *buffers: Tensor) -> None:
        """Set the buffers that ``grow`` writes, those of ``TokenTree.node_tensors``."""
        self._grow_buffers = buffers

    def grow(self, certain: Sequence[int], depth: int, root: int, bound: StoppingBound = UNBOUNDED) -> int:
        """Append committed tokens to the text, and grow a tree below its last token, best candidates first.

        Args:
            certain: token ids to append and count.
            depth: the most levels.
            root: index of the text's last token in the request, counted from the first token of the prompt.
            bound: early-stopping bound of the policy.

        Returns:
            The number of nodes, root included.

        Raises:
            RuntimeError: the text is empty.
        """
        self._root = root
        self.append(certain)
        nodes = self._nodes(*self._grow_buffers)
        nodes.put(Guess(0.0, -1, 0.0, 0, self._text[-1]))
        open_guesses = OpenGuesses()
        self._open_children(nodes, 0, 0.0, depth, open_guesses)
        stopping = EarlyStopping(bound)
        stopping.add(0.0)
        return self._complete(nodes, depth, open_guesses, stopping)

    def set_fill_buffers(self, *buffers: Tensor) -> None:
        """Set the buffers of ``fill``, given in this order.

        They are those of ``TokenTree.node_tensors``, then the tree's pool_tokens and pool_scores.
        """
        self._fill_buffers = buffers

    def fill(self, depth: int, root: int, bound: StoppingBound = UNBOUNDED) -> int:
        """Extend a tree that another drafter has grown below the text's last token with the best continuations.

        Below a node that the drafter has run, whose candidates are in the pool, the two estimates are averaged, each
        weighted by the sum of its probabilities. Elsewhere the higher estimate of a token is used. The drafter's nodes
        get new scores.

        Args:
            depth: the most levels.
            root: index of the text's last token in the request, counted from the first token of the prompt.
            bound: early-stopping bound of the policy.

        Returns:
            The number of nodes, root included.

        Raises:
            RuntimeError: the text is empty.
        """
        self._root = root
        *buffers, pool_tokens, pool_scores = self._fill_buffers
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
            ours = dict(self._below(nodes.paths[node]))
            children = [c for c in range(1, nodes.size) if nodes.parent(c) == node and math.isfinite(falls[c])]
            theirs = unattached_candidates(pool_tokens, pool_scores, node, nodes.capacity, drafted[node])
            candidates = pool_tokens.numel() // nodes.capacity
            is_read = bool(theirs) or (1 < candidates <= len(children))  # or all its candidates are attached
            for child in children:  # another drafter may have attached a candidate
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
                open_guesses.add(node, nodes.score(node), likeliest_children(list(likely.items()), left))
        standing = [score for node in range(nodes.size) if math.isfinite(score := nodes.score(node))]
        return self._complete(nodes, depth, open_guesses, EarlyStopping(bound, standing))

    def _nodes(self, *buffers: Tensor) -> Nodes:
        if not self._text:
            raise RuntimeError("no text to grow a tree from")
        return Nodes(*buffers)

    def _complete(self, nodes: Nodes, depth: int, open_guesses: OpenGuesses, stopping: EarlyStopping) -> int:
        """Attach the best candidates and open their children until the tree is full. Return its number of nodes."""
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
            open_guesses.add(node, score, likeliest_children(self._below(path), MOST_LIKELY))

    def _below(self, path: list[int]) -> list[tuple[int, float]]:
        """Return all candidates after the text and ``path`` as (token, probability), reweighed by the draws."""
        likely = self._likely(self._behind(path))
        return likely if self._draws is None else self._draws.reweigh(likely, self._root + len(path) + 1)

    def _behind(self, path: list[int]) -> list[int]:
        """Return the last ``LONGEST`` tokens of the text followed by ``path``."""
        return [*self._text[-LONGEST:], *path][-LONGEST:]

    def _likely(self, path: list[int]) -> list[tuple[int, float]]:
        """Return all candidates after ``path`` as (token, probability), in the order of ``features``."""
        counts, totals, bias, out, nothing = self._weights
        seen, followed = self._gather(path)
        if not followed:
            return []
        base = bias.copy()
        for context, total in enumerate(seen):
            if total:
                base += totals[context] * math.log1p(total)
        numbers = []
        for times in followed.values():
            hidden = base.copy()
            for context, count in enumerate(times):
                if count:
                    share = count / seen[context]
                    hidden += counts[context, 0] * math.log1p(count) + counts[context, 1] * share
            numbers.append(float(out @ np.maximum(hidden, 0.0)))
        most = max(*numbers, float(nothing[0]))
        likely = [math.exp(number - most) for number in numbers]
        whole = sum(likely) + math.exp(float(nothing[0]) - most)
        # Rounded to float32, so that the native code, which sums in another order, gives the same result.
        return [(token, float(np.float32(each / whole))) for token, each in zip(followed, likely, strict=True)]

    def _gather(self, path: list[int]) -> ContextCounts:
        """Collect the candidates after ``path``: by falling context length, first of the text, then of the table."""
        found = ContextCounts([0] * NUM_CONTEXTS, {})
        for length in range(min(LONGEST, len(path)), 0, -1):
            _add(found, length - 1, self._contexts.get(tuple(path[-length:])), MAX_CONTINUATIONS)
        for length in range(min(TABLE_LENGTH, len(path)), 0, -1):
            _add(found, LONGEST + length - 1, self._table.get(table_key(path[-length:])))
        return found


def _add(found: ContextCounts, context: int, continuations: Continuations | None, most: int | None = None) -> None:
    if continuations is None:
        return
    found.seen[context] = continuations.total
    for token, count in continuations.ranked[:most]:
        found.followed.setdefault(token, [0] * NUM_CONTEXTS)[context] = count


def table_key(context: Sequence[Tokens]) -> Tokens:
    """Return the int64 key of a context of one to three tokens in an n-gram table.

    Args:
        context: token ids, each up to ``MOST_TOKEN``, in text order. For many contexts of one length: an array for each
            index in the context.
    """
    key = context[0] + 1
    for token in context[1:]:
        key = key << TOKEN_BITS | token + 1
    return key


def has_one_token(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return for each key of an n-gram table whether its context has one token. Each counted token has such a one."""
    found: npt.NDArray[np.bool_] = keys < 1 << TOKEN_BITS
    return found


def is_longest(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return for each key of an n-gram table whether its context has three tokens, the longest."""
    found: npt.NDArray[np.bool_] = keys >= 1 << TOKEN_BITS * (TABLE_LENGTH - 1)
    return found
