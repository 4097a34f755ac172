"""Prefix reuse: which tokens have KV entries in a cache, so that a request with the same prefix can skip them."""

from collections.abc import Sequence

from yggdrasil.runtime.states.snapshots import KeptStates


class KeptText:
    """The committed tokens of a cache, of which the first ``num_rows`` have KV entries, in slots equal to their index.

    ``lead`` holds the tokens before ``tokens``. They never have entries: a draft head's cache lacks the first token.
    Code that writes other entries to the cache must call ``forget`` first. Code that times steps at a context length
    without computing its entries calls ``pretend``. A text with recurrent states can continue only at its end and at
    positions at which the states were copied.
    """

    def __init__(self, states: KeptStates | None = None) -> None:
        self.states = states
        self.lead: tuple[int, ...] = ()
        self.tokens: list[int] = []
        self.num_rows = 0
        self._is_real = True

    @property
    def num_kept(self) -> int:
        """Number of tokens, from the first of ``tokens``, whose KV entries a request may reuse; 0 after ``pretend``."""
        return self._place(min(self.num_rows, len(self.tokens))) if self._is_real else 0

    @property
    def whole(self) -> list[int]:
        """Token ids of the whole text: ``lead``, the first tokens of a draft head's text, then ``tokens``."""
        return [*self.lead, *self.tokens]

    def shared(self, whole: Sequence[int], ahead: int = 0, most: int | None = None) -> int:
        """Return how many tokens, from the first of ``tokens``, a request with the text ``whole`` can reuse.

        ``whole`` begins with ``lead`` and these tokens. They have KV entries (but see ``ahead``), and recurrent states
        after them are available.

        Args:
            whole: token ids of the request's text, ``lead`` included.
            ahead: number of tokens after the last KV entry that count as well, because the caller holds the hidden
                states from which it can compute their entries.
            most: upper limit of the result; None means no limit.
        """
        same = self._same(whole, ahead)
        return self._place(same if most is None else max(0, min(same, most)))

    def _place(self, num_rows: int) -> int:
        """Return the largest number of tokens, at most ``num_rows``, after which the text can continue."""
        if self.states is None:
            return num_rows
        return max(place for place in self.states.resume_points() if place <= num_rows)

    def _same(self, whole: Sequence[int], ahead: int) -> int:
        """Return the length of the prefix of ``tokens`` shared with ``whole``, see ``shared``."""
        start = len(self.lead)
        if tuple(whole[:start]) != self.lead or not self._is_real:
            return 0
        most = min(self.num_kept + ahead, len(self.tokens), len(whole) - start)
        if self.tokens[:most] == list(whole[start : start + most]):
            return most
        return next(i for i in range(most) if self.tokens[i] != whole[start + i])

    def begin(self, tokens: Sequence[int], num_rows: int, lead: Sequence[int] = ()) -> None:
        """Set the text to ``lead`` and ``tokens`` (token ids), of which the first ``num_rows`` tokens have KV entries.

        Args:
            num_rows: a result of ``shared``. Copies of recurrent states after more tokens are dropped.
            lead: the text's tokens before ``tokens``, which never have KV entries.
        """
        if self.states is not None:
            self.states.begin(num_rows)
        self._hold(tokens, num_rows, lead)

    def pretend(self, tokens: Sequence[int], num_rows: int) -> None:
        """Set the text as if the first ``num_rows`` of ``tokens`` had KV entries, to time steps at this context length.

        The entries were never computed, so no later request reuses them.
        """
        self._hold(tokens, num_rows)
        self._is_real = False

    def _hold(self, tokens: Sequence[int], num_rows: int, lead: Sequence[int] = ()) -> None:
        self.lead, self.tokens, self.num_rows, self._is_real = tuple(lead), list(tokens), num_rows, True

    def forget(self) -> None:
        """Drop the text, so that no later request reuses its KV entries."""
        if self.states is not None:
            self.states.forget()
        self.begin((), 0)
