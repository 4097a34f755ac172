"""What llama-server's look-ups draft, played over recorded text: written from what they do, to predict what they give.

A look-up sees the text up to the token that is certain but not verified yet, the last one. ``tests/export`` holds what
the server itself drafted on such texts.
"""

from collections.abc import Sequence
from typing import Protocol


class LookUp(Protocol):
    """One way of drafting a chain from the text alone."""

    def begin(self, prompt: Sequence[int]) -> None:
        """A request with this prompt begins."""

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        """What may follow ``text``, which goes on where the last call's ended."""

    def settle(self, drafted: int, accepted: int) -> None:
        """So many of the tokens drafted last were right; not called where none of them were verified."""


class Occurrences:
    """Where each n-gram of one text begins, in order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ends = size  # of the next n-gram that is not known yet
        self._starts: dict[tuple[int, ...], list[int]] = {}

    def of_end(self, text: Sequence[int]) -> list[int]:
        """Places of ``text``'s last n-gram, itself the last of them; the text has only grown since the last call."""
        for end in range(self._ends, len(text) + 1):
            self._starts.setdefault(tuple(text[end - self._size : end]), []).append(end - self._size)
        self._ends = max(self._ends, len(text) + 1)
        return self._starts.get(tuple(text[-self._size :]), []) if len(text) >= self._size else []


class NGramSimple:
    """``ngram-simple``: the ``draft`` tokens behind the last earlier place of the text's last ``match`` tokens.

    It drafts nothing that is shorter than ``match``, and leaves the text's first place and its last token out.
    """

    def __init__(self, match: int, draft: int) -> None:
        self._match, self._draft = match, draft

    def begin(self, prompt: Sequence[int]) -> None:
        self._places = Occurrences(self._match)

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        starts, verified = self._places.of_end(text), len(text) - 1
        if verified <= self._match + self._draft + 1:
            return []
        start = next((start for start in reversed(starts[-3:]) if start <= verified - self._match - 1), 0)
        behind = start + self._match
        found = text[behind : min(behind + self._draft, verified)] if start else []
        return found if len(found) >= self._match else []

    def settle(self, drafted: int, accepted: int) -> None:
        pass


class NGramMod:
    """``ngram-mod``: token by token what followed the last ``match`` tokens the last time, from ``least`` to ``most``.

    The table outlives a request, takes new text in every 32 tokens, and is emptied after five bad drafts in a row.
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

    def settle(self, drafted: int, accepted: int) -> None:
        self._bad = self._bad + 1 if 4 * accepted < drafted else 0
        if self._bad == 5:
            self._table.clear()
            self._bad = self._known = 0

    def _learn(self, text: Sequence[int], end: int) -> None:
        for start in range(self._known, end - self._match):
            self._table[tuple(text[start : start + self._match])] = text[start + self._match]
        self._known = end - self._match
