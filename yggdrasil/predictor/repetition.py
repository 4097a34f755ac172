"""Detects that the end of a text repeats an earlier part of it.

Greedy text falls into loops and copies from its prompt; in such stretches long drafts are accepted. Detection costs one
dictionary lookup per token and imports neither torch nor numpy.
"""

from collections.abc import Iterable, Sequence

NGRAM = 3  # tokens that must agree before a repetition is suspected


class Repetition:
    """Follows a repetition, which begins when the last ``NGRAM`` tokens occurred before and ends at a mismatch."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._continuations: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self._guess = -1  # index of the token that is predicted to come next, -1 without a repetition

    @property
    def period(self) -> int:
        """Distance in tokens to the repeated part; 0 without a repetition."""
        return len(self.text) - self._guess if self._guess >= 0 else 0

    def append(self, token: int) -> bool:
        """Append the token id ``token`` to the text, and return whether the current repetition had predicted it.

        The result is False if there was no repetition.
        """
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


def count_repeated(prompt: Sequence[int], output: Sequence[int]) -> int:
    """Count the tokens of ``output`` that a look-up of three-token contexts would predict.

    A token counts if it also followed the last earlier occurrence of the three tokens before it, in ``prompt`` or
    ``output`` (token ids).
    """
    text = [*prompt, *output]
    continuations: dict[tuple[int, ...], int] = {}  # three tokens -> the token that followed their last occurrence
    count = 0
    for position in range(NGRAM, len(text)):
        ngram = tuple(text[position - NGRAM : position])
        count += position >= len(prompt) and continuations.get(ngram) == text[position]
        continuations[ngram] = text[position]
    return count


def repeated_share(documents: Iterable[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Return the share of output tokens that a look-up of three-token contexts would predict; 0 without output.

    Args:
        documents: pairs (token ids of the prompt, token ids of the output).
    """
    texts = list(documents)
    return sum(count_repeated(*text) for text in texts) / max(sum(len(output) for _, output in texts), 1)
