"""Simulations of llama-server's n-gram lookups, to predict their accepted lengths on recorded text.

A lookup drafts after the accepted text, whose last token the target has not read yet. ``tests/export`` compares the
drafts with those of a real server.
"""

from collections.abc import Sequence
from typing import Protocol


class LookUp(Protocol):
    """A drafter of chains that reads only the text."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a request with the token ids ``prompt``; called before ``draft``."""

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        """Return the token ids that the lookup drafts after ``text``; empty if it drafts none.

        Args:
            text: token ids of prompt and accepted tokens; it begins with ``text`` of the request's last call.
        """

    def observe(self, drafted: int, accepted: int) -> None:
        """Record that ``accepted`` of the last draft's ``drafted`` tokens (at least 1) were accepted."""


class Occurrences:
    """Index of one growing text: n-gram of ``size`` tokens -> the start positions of its occurrences, ascending."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ends = size  # end of the next n-gram to index
        self._starts: dict[tuple[int, ...], list[int]] = {}

    def of_last_ngram(self, text: Sequence[int]) -> list[int]:
        """Return the start indices, ascending, of all occurrences of the last ``size`` tokens of ``text``.

        The last occurrence, at the end of ``text``, is included. The list is empty if ``text`` is shorter.

        Args:
            text: token ids; they begin with ``text`` of the last call.
        """
        for end in range(self._ends, len(text) + 1):
            self._starts.setdefault(tuple(text[end - self._size : end]), []).append(end - self._size)
        self._ends = max(self._ends, len(text) + 1)
        return self._starts.get(tuple(text[-self._size :]), []) if len(text) >= self._size else []


class NGramSimple:
    """``ngram-simple``: drafts the ``draft`` tokens after the previous occurrence of the text's last ``match`` tokens.

    As in llama.cpp, drafts shorter than ``match`` are dropped. An occurrence at the text's first position does not
    count, and the text's last token is not drafted.
    """

    def __init__(self, match: int, draft: int) -> None:
        self._match, self._draft = match, draft

    def begin(self, prompt: Sequence[int]) -> None:
        self._places = Occurrences(self._match)

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        starts, verified = self._places.of_last_ngram(text), len(text) - 1
        if verified <= self._match + self._draft + 1:
            return []
        start = next((start for start in reversed(starts[-3:]) if start <= verified - self._match - 1), 0)
        behind = start + self._match
        found = text[behind : min(behind + self._draft, verified)] if start else []
        return found if len(found) >= self._match else []

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class NGramMod:
    """``ngram-mod``: drafts ``least`` to ``most`` tokens, each the latest continuation of the ``match`` tokens before.

    The table of continuations persists across requests. Text is added once more than 32 verified tokens are not in the
    table. The table is cleared after five successive drafts of which less than a quarter of the tokens was accepted.
    """

    def __init__(self, match: int, least: int, most: int) -> None:
        self._match, self._least, self._most = match, least, most
        self._table: dict[tuple[int, ...], int] = {}
        self._bad = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._known = 0
        if len(prompt) >= self._match:
            self._learn(prompt, len(prompt))

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        verified = len(text) - 1
        if verified < self._match:
            return []
        if self._known + 32 < verified:
            self._learn(text, verified)
        window, found = list(text[-self._match :]), list[int]()
        while len(found) < self._most and (token := self._table.get(tuple(window))) is not None:
            found.append(token)
            window = [*window[1:], token]
        return found if len(found) == self._most or len(found) >= self._least else []

    def observe(self, drafted: int, accepted: int) -> None:
        self._bad = self._bad + 1 if 4 * accepted < drafted else 0
        if self._bad == 5:
            self._table.clear()
            self._bad = self._known = 0

    def _learn(self, text: Sequence[int], end: int) -> None:
        for start in range(self._known, end - self._match):
            self._table[tuple(text[start : start + self._match])] = text[start + self._match]
        self._known = end - self._match
