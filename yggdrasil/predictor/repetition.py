"""How the end of a text repeats an earlier place of it.

Greedy text falls into loops and copies from its prompt; there a drafter is right for long. No torch, no numpy: one
dictionary look-up a token.
"""

NGRAM = 3  # tokens that must agree before a repetition is suspected


class Repetition:
    """A repetition is suspected where the last ``NGRAM`` tokens have occurred before, and followed until it errs."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._continuations: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self._guess = -1  # index of the token that should come next, -1 where nothing repeats

    @property
    def period(self) -> int:
        """How far back the earlier place lies; 0 where nothing repeats."""
        return len(self.text) - self._guess if self._guess >= 0 else 0

    def append(self, token: int) -> bool:
        """One more token is certain; returns whether the repetition told it."""
        is_hit = self._guess >= 0 and self.text[self._guess] == token
        self.text.append(token)
        ngram = tuple(self.text[-NGRAM:])
        if is_hit:
            self._guess += 1
        else:
            self._guess = self._continuations.get(ngram, -1)
        if len(ngram) == NGRAM:
            self._continuations[ngram] = len(self.text)
        return is_hit
