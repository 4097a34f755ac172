"""The text whose rows a cache holds: what a later request that begins alike need not read again."""

from collections.abc import Sequence


class KeptText:
    """Certain tokens, of which the first ``num_rows`` have their rows in a cache's slots, each at its position.

    ``lead`` are the tokens of the text that stand before them and never have rows: a head's cache lacks the first.
    Whoever writes to the cache in another way says so: ``forget`` before rows of something else, ``pretend`` to stand
    behind rows that were never read.
    """

    def __init__(self) -> None:
        self.lead: tuple[int, ...] = ()
        self.tokens: list[int] = []
        self.num_rows = 0
        self._is_real = True

    @property
    def num_kept(self) -> int:
        """Rows that a later request may keep: none where they were only pretended."""
        return min(self.num_rows, len(self.tokens)) if self._is_real else 0

    @property
    def whole(self) -> list[int]:
        """The text from its first token on."""
        return [*self.lead, *self.tokens]

    def shared(self, whole: Sequence[int], ahead: int = 0) -> int:
        """How many rows the text ``whole`` can keep: up to the first token that differs.

        ``ahead`` tokens behind the rows count as if they had rows, for a caller that holds what those are made of.
        """
        start = len(self.lead)
        if tuple(whole[:start]) != self.lead or not self._is_real:
            return 0
        most = min(self.num_kept + ahead, len(self.tokens), len(whole) - start)
        if self.tokens[:most] == list(whole[start : start + most]):
            return most
        return next(i for i in range(most) if self.tokens[i] != whole[start + i])

    def begin(self, tokens: Sequence[int], num_rows: int, lead: Sequence[int] = ()) -> None:
        """The text is ``lead`` and ``tokens`` now, ``num_rows`` of them with rows already, as ``shared`` found."""
        self.lead, self.tokens, self.num_rows, self._is_real = tuple(lead), list(tokens), num_rows, True

    def pretend(self, tokens: Sequence[int], num_rows: int) -> None:
        """As ``begin``, but the rows are not this text's: nothing of it is ever kept. For timing steps."""
        self.begin(tokens, num_rows)
        self._is_real = False

    def forget(self) -> None:
        """No row holds anything that may be kept."""
        self.begin((), 0)
