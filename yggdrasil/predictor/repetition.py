"""How the end of a text repeats an earlier place of it, what would come next if it went on, and how sure that is.

Greedy text falls into loops and copies from its prompt; there the earlier place tells the next tokens for nothing. No
torch, no numpy: one dictionary look-up a token.
"""

NGRAM = 3  # tokens that must agree before a repetition is suspected
_LONGEST = 64  # tokens that are compared when one is found
_CLASSES = 8  # of lengths: 1, 2 to 3, 4 to 7, ... tokens; the last is open
_MEMORY = 64  # graded guesses of a class after which older ones count half


class Repetition:
    """A repetition is suspected where the last ``NGRAM`` tokens have occurred before, and followed until it errs."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._followers: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self._guess = -1  # index of the token that should come next, -1 where nothing repeats
        self.length = 0  # tokens that agree so far
        self._right, self._graded = [0.0] * _CLASSES, [0.0] * _CLASSES

    @property
    def period(self) -> int:
        """How far back the earlier place lies; 0 where nothing repeats."""
        return len(self.text) - self._guess if self._guess >= 0 else 0

    def append(self, token: int) -> bool:
        """One more token is certain; returns whether the repetition told it."""
        is_hit = self._guess >= 0 and self.text[self._guess] == token
        if self._guess >= 0:
            self._grade(is_hit)
        self.text.append(token)
        ngram = tuple(self.text[-NGRAM:])
        if is_hit:
            self.length += 1
            self._guess += 1
        else:
            self._guess = self._followers.get(ngram, -1)
            self.length = self._agreeing() if self._guess >= 0 else 0
        if len(ngram) == NGRAM:
            self._followers[ngram] = len(self.text)
        return is_hit

    def continuation(self, count: int) -> list[int]:
        """The next ``count`` tokens if it goes on; none where nothing repeats.

        What runs into the end of the text goes on with its own first tokens, as an LZ77 copy does.
        """
        if self._guess < 0:
            return []
        tokens, period = self.text[self._guess : self._guess + count], self.period
        while len(tokens) < count:
            tokens.append(tokens[-period])
        return tokens

    def survival(self, count: int) -> list[float]:
        """Estimated probability that the first 1, 2, ... ``count`` tokens of the continuation are all right."""
        if self._guess < 0:
            return []
        values, total, end = [], 1.0, self.length + count
        length = self.length
        while length < end:
            group = _group(length)
            rate = self._rate(group)
            last = end if group == _CLASSES - 1 else min(end, 1 << (group + 1))
            for _ in range(length, last):
                total *= rate
                values.append(total)
            length = last
        return values

    def _agreeing(self) -> int:
        """How many tokens before the guess are those at the end of the text."""
        length = NGRAM
        while length < min(_LONGEST, self._guess) and self.text[self._guess - 1 - length] == self.text[-1 - length]:
            length += 1
        return length

    def _rate(self, group: int) -> float:
        """Share of right guesses in this text, smoothed: before any, n of n + 1 for a class that begins at n tokens."""
        prior = float(max(NGRAM, 1 << group))
        return (self._right[group] + prior) / (self._graded[group] + prior + 1.0)

    def _grade(self, is_right: bool) -> None:
        group = _group(self.length)
        if self._graded[group] >= _MEMORY:
            self._graded[group] /= 2
            self._right[group] /= 2
        self._graded[group] += 1
        self._right[group] += is_right


def _group(length: int) -> int:
    return min(length.bit_length() - 1, _CLASSES - 1)
