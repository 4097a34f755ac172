"""The text whose rows a cache holds: what a later request that begins alike need not read again."""

from collections.abc import Collection, Sequence
from typing import Protocol


class States(Protocol):
    """Recurrent states, from which a text can continue only at the positions that have a copy."""

    def places(self) -> Collection[int]:
        """Numbers of tokens after which a text can continue; 0 is one of them."""

    def begin(self, num_rows: int) -> None:
        """Drop what follows the first ``num_rows`` tokens, a number that ``places`` lists."""


class KeptText:
    """Certain tokens, of which the first ``num_rows`` have their rows in a cache's slots, each at its position.

    ``lead`` are the tokens of the text that stand before them and never have rows: a head's cache lacks the first.
    Whoever writes to the cache in another way says so: ``forget`` before rows of something else, ``pretend`` to stand
    behind rows that were never read.
    """

    def __init__(self, states: States | None = None) -> None:
        self.states = states
        self.lead: tuple[int, ...] = ()
        self.tokens: list[int] = []
        self.num_rows = 0
        self._is_real = True

    @property
    def num_kept(self) -> int:
        """Rows that a later request may keep: none where they were only pretended."""
        return self._place(min(self.num_rows, len(self.tokens))) if self._is_real else 0

    @property
    def whole(self) -> list[int]:
        """The text from its first token on."""
        return [*self.lead, *self.tokens]

    def shared(self, whole: Sequence[int], ahead: int = 0, most: int | None = None) -> int:
        """How many rows the text ``whole`` can keep, ``most`` at most: up to the first token that differs.

        ``ahead`` tokens behind the rows count as if they had rows, for a caller that holds what those are made of. With
        recurrent layers it is a place at which states are kept.
        """
        same = self._same(whole, ahead)
        return self._place(same if most is None else max(0, min(same, most)))

    def _place(self, num_rows: int) -> int:
        """The largest number of tokens up to ``num_rows`` after which the text can continue."""
        if self.states is None:
            return num_rows
        return max(place for place in self.states.places() if place <= num_rows)

    def _same(self, whole: Sequence[int], ahead: int) -> int:
        start = len(self.lead)
        if tuple(whole[:start]) != self.lead or not self._is_real:
            return 0
        most = min(self.num_kept + ahead, len(self.tokens), len(whole) - start)
        if self.tokens[:most] == list(whole[start : start + most]):
            return most
        return next(i for i in range(most) if self.tokens[i] != whole[start + i])

    def begin(self, tokens: Sequence[int], num_rows: int, lead: Sequence[int] = ()) -> None:
        """The text is ``lead`` and ``tokens`` now, ``num_rows`` of them with rows already, as ``shared`` found."""
        if self.states is not None:
            self.states.begin(num_rows)
        self._hold(tokens, num_rows, lead)

    def pretend(self, tokens: Sequence[int], num_rows: int) -> None:
        """As ``begin``, but the rows are not this text's: nothing of it is ever kept. For timing steps."""
        self._hold(tokens, num_rows)
        self._is_real = False

    def _hold(self, tokens: Sequence[int], num_rows: int, lead: Sequence[int] = ()) -> None:
        self.lead, self.tokens, self.num_rows, self._is_real = tuple(lead), list(tokens), num_rows, True

    def forget(self) -> None:
        """Forget the text: a later request reuses no row."""
        self.begin((), 0)
