"""The stretches of own text that are trained on: an answer and the end of its prompt."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from yggdrasil.calibration.own_text import Document
from yggdrasil.training.settings import CONTEXT

_HELD_OUT = 32  # every so many documents one is held out; later ones change nothing of it


class Window(NamedTuple):
    """A document whose states from ``start`` on are kept."""

    tokens: list[int]  # prompt and answer
    start: int
    answer: int  # where the answer begins, counted from ``start``

    @property
    def length(self) -> int:
        """Tokens that are kept."""
        return len(self.tokens) - self.start

    @property
    def num_learned(self) -> int:
        """Tokens of the answer."""
        return self.length - self.answer


class Split(NamedTuple):
    """What is trained on, and what is only measured on; both in the order of writing."""

    trained: list[Window]
    held_out: list[Window]


def window_of(document: Document) -> Window:
    """The answer with the end of its prompt."""
    prompt, answer = document
    start = max(0, len(prompt) - CONTEXT)
    return Window([*prompt, *answer], start, len(prompt) - start)


def split(documents: Sequence[Document], judges: Collection[tuple[int, ...]] = ()) -> Split:
    """Windows of all documents that have an answer to learn from; a prompt that comes again stays on its side.

    ``judges``: ends of prompts (``end_of``) whose answers are for neither.
    """
    found = Split([], [])
    sides: dict[tuple[int, ...], list[Window]] = {}
    for number, document in enumerate(documents):
        if len(document.answer) > 1 and document.asked not in judges:
            side = found.held_out if number % _HELD_OUT == 0 else found.trained
            sides.setdefault(tuple(document.prompt), side).append(window_of(document))
    return found
