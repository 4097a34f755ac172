"""Splits the target's text into training windows: an answer with the end of its prompt."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from yggdrasil.calibration.own_text import Document
from yggdrasil.training.settings import CONTEXT

_HELD_OUT = 32  # one document in so many is held out; later documents of other prompts do not change which
_MOST_ALIKE = 4  # documents of one prompt go to the same side unless they are more than one in so many


class Window(NamedTuple):
    """A document, of which the target's states are stored from token ``start`` on."""

    tokens: list[int]  # prompt and answer
    start: int
    answer: int  # index of the answer's first token, relative to ``start``

    @property
    def length(self) -> int:
        """Number of tokens of the training window whose hidden states are stored."""
        return len(self.tokens) - self.start

    @property
    def num_learned(self) -> int:
        """Number of tokens of the training window's answer."""
        return self.length - self.answer

    @property
    def text(self) -> tuple[list[int], list[int]]:
        """Token ids of the whole prompt and of the answer."""
        answer = self.start + self.answer
        return self.tokens[:answer], self.tokens[answer:]


class Split(NamedTuple):
    """Windows to train on and windows to evaluate on, both in the order in which they were generated."""

    trained: list[Window]
    held_out: list[Window]


def window_of(document: Document) -> Window:
    """Return the training window of a document: its answer and at most the last 192 tokens of its prompt."""
    prompt, answer = document
    start = max(0, len(prompt) - CONTEXT)
    return Window([*prompt, *answer], start, len(prompt) - start)


def split(documents: Sequence[Document], judges: Collection[tuple[int, ...]] = ()) -> Split:
    """Split documents into training and held-out windows, one of 32 held out, the first of them included.

    Equal prompts go to the same side, because their answers are alike. A prompt of more than a quarter of the
    documents, such as an instruction that all texts share, does not: only its equal answers do. Documents with an
    answer of less than two tokens are left out.

    Args:
        judges: keys of prompts (``prompt_key``) on which drafters are evaluated, whose documents are left out.
    """
    found = Split([], [])
    used = [each for each in documents if len(each.answer) > 1 and each.prompt_key not in judges]
    counts = Counter(tuple(each.prompt) for each in used)
    sides: dict[tuple[int, ...], list[Window]] = {}
    for number, document in enumerate(used):
        key = tuple(document.prompt)
        if _MOST_ALIKE * counts[key] > len(used):
            key = (*key, *document.answer)
        side = found.held_out if number % _HELD_OUT == 0 else found.trained
        sides.setdefault(key, side).append(window_of(document))
    return found
