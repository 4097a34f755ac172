"""Counted contexts in Python: what `evidence.h` and `counts.h` (``models/kernels``) do natively, without a compiler.

A context's followers are kept by count, the newer first among equals. Evidence for a candidate is the longest context
of the text that it has followed, the longest of the table, its counts in both, its place among what the target found
likeliest after the last token the last time, and how many candidates come before it; a belief (one weight a kind of
evidence, added up as log-odds) makes a probability of it. Trees are grown best first, so their nodes come in falling
order of score and the first n of them are the best tree of n.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.drafters.best_first import Guess, Nodes, OpenGuesses, offered, shares
from yggdrasil.tree.stakes import NO_STAKES, Race, Stakes

MOST_FOLLOWERS = 16  # of a context that are looked at
SHARES, TOTALS, RANKS = 5, 4, 13
MOST_LIKELY = 0.98  # of all children together: none is certain
LEAST_PATH = -6.2  # log-probability of a node that is worth no row of any pass, until it is said
TABLE_LENGTH = 2  # tokens of the longest context of a table
RUNNERS_UP = 8  # of a token that are kept at most


def num_kinds(longest: int) -> int:
    """Kinds of evidence that contexts of up to ``longest`` tokens give; 0 stands for none."""
    return 1 + longest * TOTALS * SHARES


def evidence_kind(length: int, count: int, total: int) -> int:
    """The kind of evidence: context length, how often the context was seen, the candidate's share of that."""
    seen = 0 if total == 1 else 1 if total <= 3 else 2 if total <= 10 else 3
    return 1 + ((length - 1) * TOTALS + seen) * SHARES + min(count * SHARES // total, SHARES - 1)


class Followers:
    """What has followed one context, by count."""

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


class PortableCounts:
    """The interface of the native ``Counts``."""

    def __init__(
        self, longest: int, weights_text: Tensor, weights_table: Tensor, weights_recycled: Tensor, weights_rank: Tensor
    ) -> None:
        weights = weights_text, weights_table, weights_recycled, weights_rank
        if tuple(map(len, weights)) != (num_kinds(longest), num_kinds(TABLE_LENGTH), 1 + RUNNERS_UP, RANKS):
            raise RuntimeError("weights do not fit the kinds of evidence")
        self._longest = longest
        self._least_path = LEAST_PATH
        self._weights = [each.tolist() for each in weights]
        self._recycled: dict[int, list[int]] = {}  # token -> its runners-up the last time, best first
        self._text: list[int] = []
        self._contexts: dict[tuple[int, ...], Followers] = {}
        self._table: dict[int, Followers] = {}
        self._bed: tuple[Tensor, ...] = ()  # buffers of the tree that is grown

    def set_table(self, keys: Tensor, totals: Tensor, starts: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Contexts of one or two tokens, as ``Table`` keeps them."""
        followers, places = list(zip(tokens.tolist(), counts.tolist(), strict=True)), starts.tolist()
        self._table.clear()
        for i, (key, total) in enumerate(zip(keys.tolist(), totals.tolist(), strict=True)):
            entry = self._table[key] = Followers()
            entry.total, entry.ranked = total, followers[places[i] : places[i + 1]]

    def recycle(self, tokens: Sequence[int], followers: Tensor) -> None:
        """After ``tokens[i]`` the target found ``followers[i]`` likeliest, best first."""
        if followers.ndim != 2 or len(followers) != len(tokens) or followers.shape[1] > RUNNERS_UP:
            raise RuntimeError(f"runners-up must be [tokens, {RUNNERS_UP}] at most")
        self._recycled.update(zip(tokens, followers.tolist(), strict=True))

    def forget(self) -> None:
        """Another text begins."""
        self._recycled.clear()
        self._contexts.clear()
        self._text.clear()

    def append(self, tokens: Sequence[int]) -> None:
        """More tokens are certain."""
        for token in tokens:
            end = len(self._text)
            for length in range(1, min(self._longest, end) + 1):
                self._contexts.setdefault(tuple(self._text[end - length :]), Followers()).add(token)
            self._text.append(token)

    def leave_out_below(self, score: float) -> None:
        """No node is grown whose path has a lower log-probability."""
        self._least_path = score

    def evidence(self, path: Sequence[int]) -> Tensor:
        """What may follow ``path`` (its last tokens count), [n, 4] int64.

        Rows: token, kind in text, kind in table, place among the runners-up from 1 on.
        """
        rows = [[token, *kinds] for token, kinds in self._gather(list(path)).items()]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)

    def grow_in(self, *buffers: Tensor) -> None:
        """From now on trees are grown in these: tokens, parents, depths, scores, edges, ancestors."""
        self._bed = buffers

    def grow(self, certain: Sequence[int], depth: int, stakes: Stakes = NO_STAKES) -> int:
        """Count ``certain`` tokens, plant the text's last one, grow a tree as deep as ``depth`` and ``stakes`` want."""
        self.append(certain)
        nodes = self._nodes(*self._bed)
        nodes.put(Guess(0.0, -1, 0.0, 0, self._text[-1]))
        open_guesses = OpenGuesses()
        self._open_children(nodes, 0, 0.0, depth, open_guesses)
        race = Race(stakes)
        race.add(0.0)
        return self._complete(nodes, depth, open_guesses, race)

    def fill(  # noqa: PLR0913 - the buffers of a tree
        self, tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, edges: Tensor, ancestors: Tensor,
        pool_tokens: Tensor, pool_scores: Tensor, depth: int,
    ) -> int:  # fmt: skip
        """Go on with a tree that somebody else has grown from the text's last token; returns its size.

        What is said beyond its nodes takes the places that are left. Where a drafter has read a node, whose candidates
        are in the pool then, both are believed: in proportion to what each says that it knows, the sum of its
        probabilities. Of other guesses that are the same the more confident is believed.
        """
        nodes = self._nodes(tokens, parents, depths, scores, edges, ancestors)
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
        return self._complete(nodes, depth, open_guesses, Race(NO_STAKES))

    def _nodes(self, *buffers: Tensor) -> Nodes:
        if not self._text:
            raise RuntimeError("no text to grow a tree from")
        return Nodes(*buffers)

    def _complete(self, nodes: Nodes, depth: int, open_guesses: OpenGuesses, race: Race) -> int:
        """Attach the best of the open guesses and what follows them, until the tree is full; returns its size."""
        while nodes.size < nodes.capacity and (guess := open_guesses.best) is not None:
            if -guess.cost < self._least_path or race.is_over(-guess.cost):
                break
            open_guesses.pop()
            nodes.put(guess)
            race.add(-guess.cost)
            self._open_children(nodes, nodes.size - 1, -guess.cost, depth, open_guesses)
        nodes.clear()
        return nodes.size

    def _open_children(self, nodes: Nodes, node: int, score: float, depth: int, open_guesses: OpenGuesses) -> None:
        path = nodes.paths[node]
        if len(path) < depth:
            open_guesses.add(node, score, shares(self._likely(self._behind(path)), MOST_LIKELY))

    def _behind(self, path: list[int]) -> list[int]:
        """The last tokens of the text and ``path``."""
        tail = max(self._longest, TABLE_LENGTH)
        return [*self._text[-tail:], *path][-tail:]

    def _likely(self, path: list[int]) -> list[tuple[int, float]]:
        """All candidates after ``path`` with their probabilities, in the order of their evidence."""
        found = self._gather(path).items()
        return [(token, self._probability(rank, kinds)) for rank, (token, kinds) in enumerate(found)]

    def _probability(self, rank: int, kinds: tuple[int, int, int]) -> float:
        text, table, recycled, ranks = self._weights
        odds = text[kinds[0]] + table[kinds[1]] + recycled[kinds[2]]
        return 1.0 / (1.0 + math.exp(-(ranks[min(rank, RANKS - 1)] + odds)))

    def _gather(self, path: list[int]) -> dict[int, tuple[int, int, int]]:
        """The kinds of evidence in text and table and the place among the runners-up of each candidate."""
        found: dict[int, tuple[int, int, int]] = {}
        for length in range(min(self._longest, len(path)), 0, -1):
            followers = self._contexts.get(tuple(path[-length:]))
            for token, count in followers.ranked[:MOST_FOLLOWERS] if followers else ():
                found.setdefault(token, (evidence_kind(length, count, followers.total if followers else 1), 0, 0))
        for length in range(min(TABLE_LENGTH, len(path)), 0, -1):
            entry = self._table.get(table_key(path[-length:]))
            for token, count in entry.ranked if entry else ():
                text, table, _ = found.get(token, (0, 0, 0))
                if not table:
                    found[token] = text, evidence_kind(length, count, entry.total if entry else 1), 0
        for place, token in enumerate(self._recycled.get(path[-1], ()) if path else (), start=1):
            text, table, _ = found.get(token, (0, 0, 0))
            found[token] = text, table, place
        return found


def table_key(context: Sequence[int]) -> int:
    """A context of one or two tokens as one number."""
    first, second = context if len(context) == TABLE_LENGTH else (-1, context[0])
    return (first + 1) << 32 | second


def has_one_token(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of these keys are contexts of one token: every counted token follows just one of them."""
    found: npt.NDArray[np.bool_] = keys >> 32 == 0
    return found
