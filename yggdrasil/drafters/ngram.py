"""N-gram prompt lookup as drafter: drafts the tokens that followed the last n-gram earlier in prompt and output.

Needs no model. The pool maps each n-gram to the text indices after its occurrences. The text from such an index on is
a candidate continuation. A candidate that reaches the end of the current text continues with its own first tokens, as
an LZ77 copy does, so a short period is drafted at any length.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from yggdrasil.drafters.model_free_options import NGramOptions
from yggdrasil.drafters.protocol import Budget, Capabilities, Step
from yggdrasil.tree.token_tree import TokenTree

_BOUNDARY = -1  # separator of the texts of a public pool; no token has this id
_BRANCHES = 4  # continuations in a tree if the budget has no width
_MEMORY = 64  # drafts per match size after which the weight of earlier ones is halved


class NGramDrafter:
    """Drafter that searches the text for earlier occurrences of its last tokens, the longest n-gram first."""

    name = "n-gram"
    capabilities = Capabilities()

    def __init__(self, options: NGramOptions | None = None) -> None:
        self.options = options or NGramOptions()
        self._pool = _Pool(self.options)
        self._pending: list[int] = []  # committed tokens that are not in the pool yet

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a request with the committed ``tokens`` (token ids).

        The pool of n-grams stays if ``tokens`` continue the last request's text, or if the option ``is_public_pool`` is
        set.
        """
        if not self._pool.begins(tokens):
            self._pool.open_text(self._pending)
        self._pending = list(tokens[self._pool.length :])

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Append committed ``tokens`` (token ids). ``states`` is not used."""
        self._pending.extend(tokens)

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Attach the best ``budget.width`` distinct continuations of the text's last tokens, as one tree.

        Four continuations are attached if ``budget.width`` is None. A continuation adds at most one node per level, for
        at most ``budget.depth`` and ``max_draft_len`` levels. The i-th token (from 0) of a continuation after a match
        of m tokens has the probability ``agreement(m + i)``. A later sibling gets this share of the probability that
        its earlier siblings leave.
        """
        self._read()
        guesses, width = _Trie(), budget.width or _BRANCHES
        for match_size, tokens in self._pool.continuations(min(budget.depth, self.options.max_draft_len)):
            if guesses.num_chains == width:
                break
            guesses.add(tokens, [self._pool.agreement(match_size + i) for i in range(len(tokens))])
        tree.graft(guesses.parents, guesses.tokens, guesses.log_probabilities)

    def cost(self, budget: Budget) -> Sequence[Step]:
        """Return no steps, since a look-up runs no model."""
        return ()

    def _read(self) -> None:
        # Deferred to the next draft, because a request's last tokens may lie after its end, and are then not added.
        self._pool.append(self._pending)
        self._pending = []


class _Pool:
    """The text so far, the indices after each of its n-grams, and acceptance counts by match size."""

    def __init__(self, options: NGramOptions) -> None:
        self._options = options
        self._clear()

    def _clear(self) -> None:
        self._text: list[int] = []
        self._start = 0  # index at which the current request's text begins
        self._is_sound = True  # False while a token is being added: an interrupt may leave it half added
        self._positions: dict[tuple[int, ...], list[int]] = {}  # n-gram -> indices of the tokens after it, ascending
        self._whole: dict[tuple[int, ...], int] = {}  # n-gram + candidate of full length -> the candidate's index
        sizes = self._options.max_matching_ngram_size + 1
        self._num_right, self._num_guessed = [0.0] * sizes, [0.0] * sizes  # by match size

    @property
    def length(self) -> int:
        """Number of tokens of the current request's text."""
        return len(self._text) - self._start

    def begins(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of the current request is not empty and is a prefix of ``tokens``."""
        return self._is_sound and self.length > 0 and self._text[self._start :] == list(tokens[: self.length])

    def open_text(self, rest: Sequence[int]) -> None:
        """Begin the text of another request. A private pool is cleared; a public pool first gets ``rest``.

        Args:
            rest: committed tokens of the last text that are not in the pool yet.
        """
        if not self._options.is_public_pool or not self._is_sound:
            self._clear()
        elif self._start:
            self.append(rest)
        self._text.append(_BOUNDARY)
        self._start = len(self._text)

    def append(self, tokens: Sequence[int]) -> None:
        """Add committed tokens to the text and to the n-gram index."""
        self._is_sound = False
        for token in tokens:
            self._note_continuation(token)
            self._text.append(token)
            if self._options.is_keep_all:
                self._drop_repeat(len(self._text) - self._options.max_draft_len)
        self._is_sound = True

    def continuations(self, length: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the continuations of the text's last tokens as (tokens that match, continuation), best first.

        Args:
            length: most tokens of a continuation. Continuations may repeat.
        """
        for key in self._suffixes():
            for position in self._ranked(self._positions.get(key, [])):
                yield len(key), self._continuation(position, length)

    def agreement(self, match_size: int) -> float:
        """Estimate the probability that the token which followed a match of ``match_size`` tokens follows again.

        This is the share of matches of that size in the text so far whose draft was correct, with the prior
        size / (size + 1). Sizes above the longest n-gram count as the longest.
        """
        size = min(match_size, self._options.max_matching_ngram_size)
        return (self._num_right[size] + size) / (self._num_guessed[size] + size + 1)

    def _suffixes(self) -> Iterator[tuple[int, ...]]:
        """Yield the n-grams at the end of the current text, longest first."""
        end = len(self._text)
        for size in range(min(self._options.max_matching_ngram_size, end - self._start), 0, -1):
            yield tuple(self._text[end - size :])

    def _note_continuation(self, token: int) -> None:
        """Update the acceptance counts of the longest match, then add the index of ``token`` to its n-grams."""
        position = len(self._text)
        is_graded = False
        for key in self._suffixes():
            positions = self._positions.get(key)
            if positions is None:
                self._positions[key] = [position]
                continue
            if not is_graded:
                self._grade(len(key), self._text[self._preferred(positions)] == token)
                is_graded = True
            if self._options.is_keep_all:
                positions.append(position)
            elif self._length(longest := self._preferred(positions)) < self._options.max_draft_len:
                positions[:] = longest, position  # the text's end decides which is longer

    def _drop_repeat(self, position: int) -> None:
        """Drop the candidate at ``position``, or the earlier candidate that it repeats, whichever is less preferred.

        Two candidates of an n-gram are equal if ``max_draft_len`` tokens from their positions on are equal. Without
        this, a text that loops would have many equal candidates, and each draft would search all of them.
        """
        end = position + self._options.max_draft_len
        for size in range(1, min(self._options.max_matching_ngram_size, position - self._start) + 1):
            whole = tuple(self._text[position - size : end])
            other = self._whole.setdefault(whole, position)
            if other != position:
                positions = self._positions[whole[:size]]
                del positions[bisect_left(positions, position if self._options.is_use_oldest else other)]
                if not self._options.is_use_oldest:
                    self._whole[whole] = position

    def _grade(self, size: int, is_right: bool) -> None:
        if self._num_guessed[size] >= _MEMORY:
            self._num_guessed[size] /= 2
            self._num_right[size] /= 2
        self._num_guessed[size] += 1
        self._num_right[size] += is_right

    def _ranked(self, positions: list[int]) -> Iterable[int]:
        """Return the candidates of one n-gram, preferred first."""
        if self._options.is_keep_all:
            return positions if self._options.is_use_oldest else reversed(positions)
        return [max(positions, key=self._length)] if positions else positions

    def _preferred(self, positions: list[int]) -> int:
        return next(iter(self._ranked(positions)))

    def _length(self, position: int) -> int:
        """Return the length of the candidate at ``position``: ``max_draft_len``, less at a closed text's end."""
        return len(self._continuation(position, self._options.max_draft_len))

    def _continuation(self, position: int, length: int) -> list[int]:
        tokens = self._text[position : position + length]
        if position < self._start:
            return tokens[: tokens.index(_BOUNDARY)] if _BOUNDARY in tokens else tokens
        period = len(self._text) - position
        while len(tokens) < length:
            tokens.append(tokens[-period])
        return tokens


class _Trie:
    """Trie of continuations as arguments of ``TokenTree.graft``. Node 0 is the root."""

    def __init__(self) -> None:
        self.num_chains = 0  # continuations that added a node
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.log_probabilities: list[float] = []
        self._children: dict[tuple[int, int], int] = {}
        self._left_over = [1.0]  # residual probability of each node

    def add(self, tokens: Sequence[int], probabilities: Sequence[float]) -> None:
        """Add one continuation to the tree of continuations.

        Args:
            probabilities: share (below 1) of the residual probability that each token takes at its node.
        """
        node, is_new = 0, False
        for token, probability in zip(tokens, probabilities, strict=True):
            child = self._children.get((node, token))
            if child is None:
                is_new = True
                child = self._children[node, token] = len(self._left_over)
                self.parents.append(node)
                self.tokens.append(token)
                self.log_probabilities.append(math.log(self._left_over[node] * probability))
                self._left_over[node] *= 1 - probability
                self._left_over.append(1.0)
            node = child
        self.num_chains += is_new
