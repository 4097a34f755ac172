"""The text whose rows a cache holds: what a later request that begins alike need not read again."""

from collections.abc import Sequence


class KeptText:
    """Certain tokens, of which the first ``num_rows`` have their rows in a cache's slots, each at its position.

    Whoever writes to the cache in another way says so: ``forget`` before rows of something else, ``pretend`` to stand
    behind rows that were never read.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_rows = 0
        self._is_real = True

    def shared(self, tokens: Sequence[int]) -> int:
        """How many rows a text that begins with ``tokens`` can keep: up to the first that differs."""
        most = min(self.num_rows, len(self.tokens), len(tokens)) if self._is_real else 0
        if self.tokens[:most] == list(tokens[:most]):
            return most
        return next(i for i in range(most) if self.tokens[i] != tokens[i])

    def begin(self, tokens: Sequence[int], num_rows: int) -> None:
        """The text is ``tokens`` now, ``num_rows`` of them with rows already, as ``shared`` found."""
        self.tokens, self.num_rows, self._is_real = list(tokens), num_rows, True

    def pretend(self, tokens: Sequence[int], num_rows: int) -> None:
        """As ``begin``, but the rows are not this text's: nothing of it is ever kept. For timing steps."""
        self.begin(tokens, num_rows)
        self._is_real = False

    def forget(self) -> None:
        """No row holds anything that may be kept."""
        self.begin((), 0)
