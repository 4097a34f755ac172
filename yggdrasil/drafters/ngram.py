"""N-gram lookup as drafter: what followed the last tokens earlier in prompt and output is guessed to follow again.

Needs no model. The pool maps each n-gram to the places where it was followed by something; the text from such a place
on is a candidate continuation. A candidate that runs into the end of the current text goes on with its own first
tokens, as an LZ77 copy does, so a short period is drafted at any length.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from yggdrasil.drafters.model_free_options import NGramOptions
from yggdrasil.drafters.protocol import Budget, Capabilities, Step
from yggdrasil.tree.token_tree import TokenTree

_BOUNDARY = -1  # parts the texts of a public pool; no token has this id
_BRANCHES = 4  # continuations in a tree that no draft width bounds
_MEMORY = 64  # guesses of one match size after which older ones count half


class NGramDrafter:
    """Looks the end of the text up in the text, longest match first."""

    name = "n-gram"
    capabilities = Capabilities()

    def __init__(self, options: NGramOptions | None = None) -> None:
        self.options = options or NGramOptions()
        self._pool = _Pool(self.options)
        self._pending: list[int] = []  # certain tokens that the pool does not have yet

    def begin(self, tokens: Sequence[int]) -> None:
        """Where ``tokens`` go on with the pool's text, as a chat's next turn does, it is kept; else another begins."""
        if not self._pool.begins(tokens):
            self._pool.open_text(self._pending)
        self._pending = list(tokens[self._pool.length :])

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        self._pending.extend(tokens)

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Attach the ``budget.width`` best different continuations, merged where they begin alike.

        Each adds at most one node a level. A match of s tokens has grown to s + i where i more were accepted, so the
        edge at level i + 1 gets the agreement seen for that size; a later sibling shares what earlier ones left over.
        """
        self._read()
        guesses, width = _Trie(), budget.width or _BRANCHES
        for match_size, tokens in self._pool.continuations(min(budget.depth, self.options.max_draft_len)):
            if guesses.num_chains == width:
                break
            guesses.add(tokens, [self._pool.agreement(match_size + i) for i in range(len(tokens))])
        tree.graft(guesses.parents, guesses.tokens, guesses.log_probabilities)

    def cost(self, budget: Budget) -> Sequence[Step]:
        return ()

    def _read(self) -> None:
        # Not before: the last tokens of a request, which may lie behind its end, hardly ever come here.
        self._pool.append(self._pending)
        self._pending = []


class _Pool:
    """The text so far, where each of its n-grams was followed by something, and how often the pool was right."""

    def __init__(self, options: NGramOptions) -> None:
        self._options = options
        self._clear()

    def _clear(self) -> None:
        self._text: list[int] = []
        self._start = 0  # of the current request's text
        self._is_sound = True  # no interrupt has left a token half added
        self._places: dict[tuple[int, ...], list[int]] = {}  # n-gram -> indices of the tokens after it, ascending
        self._whole: dict[tuple[int, ...], int] = {}  # n-gram with a candidate of full length -> the candidate's place
        sizes = self._options.max_matching_ngram_size + 1
        self._num_right, self._num_guessed = [0.0] * sizes, [0.0] * sizes  # by match size

    @property
    def length(self) -> int:
        """Tokens of the current text."""
        return len(self._text) - self._start

    def begins(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` begin with the whole current text, and there is one."""
        return self._is_sound and self.length > 0 and self._text[self._start :] == list(tokens[: self.length])

    def open_text(self, rest: Sequence[int]) -> None:
        """Another text: forget all, or add the ``rest`` of the last one to a public pool and close it."""
        if not self._options.is_public_pool or not self._is_sound:
            self._clear()
        elif self._start:
            self.append(rest)
        self._text.append(_BOUNDARY)
        self._start = len(self._text)

    def append(self, tokens: Sequence[int]) -> None:
        """Add certain tokens to the text, in two dictionary look-ups a token and n-gram size."""
        self._is_sound = False
        for token in tokens:
            self._note_continuation(token)
            self._text.append(token)
            if self._options.is_keep_all:
                self._drop_repeat(len(self._text) - self._options.max_draft_len)
        self._is_sound = True

    def continuations(self, length: int) -> Iterator[tuple[int, list[int]]]:
        """Candidate continuations of the text, best first, with the size of the match behind each; with repeats."""
        for key in self._suffixes():
            for place in self._ranked(self._places.get(key, [])):
                yield len(key), self._continuation(place, length)

    def agreement(self, match_size: int) -> float:
        """Estimated probability that the preferred candidate of a match is right; a longer match counts as the longest.

        Laplace-smoothed share of right guesses on the text so far, prior 1/2, 2/3, 3/4, ... for sizes 1, 2, 3, ...
        """
        size = min(match_size, self._options.max_matching_ngram_size)
        return (self._num_right[size] + size) / (self._num_guessed[size] + size + 1)

    def _suffixes(self) -> Iterator[tuple[int, ...]]:
        """The n-grams at the end of the current text, longest first."""
        end = len(self._text)
        for size in range(min(self._options.max_matching_ngram_size, end - self._start), 0, -1):
            yield tuple(self._text[end - size :])

    def _note_continuation(self, token: int) -> None:
        """Grade the guess that the longest match would have made for ``token``, then remember where it follows."""
        place = len(self._text)
        is_graded = False
        for key in self._suffixes():
            places = self._places.get(key)
            if places is None:
                self._places[key] = [place]
                continue
            if not is_graded:
                self._grade(len(key), self._text[self._preferred(places)] == token)
                is_graded = True
            if self._options.is_keep_all:
                places.append(place)
            elif self._length(longest := self._preferred(places)) < self._options.max_draft_len:
                places[:] = longest, place  # which of them is the longer is known when this text ends

    def _drop_repeat(self, place: int) -> None:
        """Of two places where an n-gram goes on alike keep the preferred; ``place`` has just got its full length.

        Candidates are a set: a text that loops would else be looked through again and again for a different one.
        """
        end = place + self._options.max_draft_len
        for size in range(1, min(self._options.max_matching_ngram_size, place - self._start) + 1):
            whole = tuple(self._text[place - size : end])
            other = self._whole.setdefault(whole, place)
            if other != place:
                places = self._places[whole[:size]]
                del places[bisect_left(places, place if self._options.is_use_oldest else other)]
                if not self._options.is_use_oldest:
                    self._whole[whole] = place

    def _grade(self, size: int, is_right: bool) -> None:
        if self._num_guessed[size] >= _MEMORY:
            self._num_guessed[size] /= 2
            self._num_right[size] /= 2
        self._num_guessed[size] += 1
        self._num_right[size] += is_right

    def _ranked(self, places: list[int]) -> Iterable[int]:
        """Candidates of one n-gram, the preferred first."""
        if self._options.is_keep_all:
            return places if self._options.is_use_oldest else reversed(places)
        return [max(places, key=self._length)] if places else places

    def _preferred(self, places: list[int]) -> int:
        return next(iter(self._ranked(places)))

    def _length(self, place: int) -> int:
        """Length of the candidate at ``place``: the longest allowed unless the end of a closed text cuts it short."""
        return len(self._continuation(place, self._options.max_draft_len))

    def _continuation(self, place: int, length: int) -> list[int]:
        tokens = self._text[place : place + length]
        if place < self._start:
            return tokens[: tokens.index(_BOUNDARY)] if _BOUNDARY in tokens else tokens
        period = len(self._text) - place
        while len(tokens) < length:
            tokens.append(tokens[-period])
        return tokens


class _Trie:
    """Continuations merged where they begin alike, in the form that ``TokenTree.graft`` takes; 0 is the root."""

    def __init__(self) -> None:
        self.num_chains = 0  # continuations that added something
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.log_probabilities: list[float] = []
        self._children: dict[tuple[int, int], int] = {}
        self._left_over = [1.0]  # probability not yet given to a node's children

    def add(self, tokens: Sequence[int], probabilities: Sequence[float]) -> None:
        """Add one continuation; ``probabilities`` (below 1) are those of its tokens if they were only children."""
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
