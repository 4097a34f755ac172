"""How much a text repeats itself: what a loop or a copy from the prompt gives away, no draft model needed."""

from collections.abc import Iterable, Sequence

from yggdrasil.predictor.repetition import NGRAM


def foretold(prompt: Sequence[int], output: Sequence[int]) -> int:
    """Tokens of ``output`` that are the ones which followed the last earlier occurrence of the three before them.

    Occurrences are looked for in the prompt and in the output so far. Every place is judged for itself.
    """
    text = [*prompt, *output]
    continuations: dict[tuple[int, ...], int] = {}  # three tokens -> the one that came after them last
    count = 0
    for place in range(NGRAM, len(text)):
        ngram = tuple(text[place - NGRAM : place])
        count += place >= len(prompt) and continuations.get(ngram) == text[place]
        continuations[ngram] = text[place]
    return count


def share_foretold(documents: Iterable[tuple[Sequence[int], Sequence[int]]]) -> float:
    """The share of all outputs that is ``foretold``, of pairs of prompt and output; 0 of no output."""
    texts = list(documents)
    return sum(foretold(*text) for text in texts) / max(sum(len(output) for _, output in texts), 1)
