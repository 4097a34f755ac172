"""Makes training windows of the target's text, and splits them into windows to train on and to evaluate on."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from yggdrasil.calibration.own_text import Document
from yggdrasil.training.settings import CONTEXT

_HELD_OUT = 32  # one of 32 documents is held out; later documents of other prompts do not change the choice
_MOST_ALIKE = 4  # documents of one prompt go to one side unless they are more than 1/4 of all


class Window(NamedTuple):
    """A document; the target's hidden states are stored for its tokens from index ``start`` on."""

    tokens: list[int]  # token ids of prompt and answer
    start: int  # index of the first token whose hidden states are stored
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
    """Windows to train on and windows to evaluate on, both in the order of their documents."""

    trained: list[Window]
    held_out: list[Window]


def window_of(document: Document) -> Window:
    """Return a document's window, whose stored states cover the answer and the last 192 tokens of the prompt."""
    prompt, answer = document
    start = max(0, len(prompt) - CONTEXT)
    return Window([*prompt, *answer], start, len(prompt) - start)


def split(documents: Sequence[Document], judges: Collection[tuple[int, ...]] = ()) -> Split:
    """Split documents into training windows and held-out windows; documents 0, 32, 64 and so on are held out.

    Documents with equal prompts go to the same side, because their answers are alike. If more than a quarter of the
    documents has one prompt, such as a shared instruction, only those with equal answers too go to the same side.
    Documents with an answer of less than two tokens are left out.

    Args:
        judges: keys (``prompt_key``) of the prompts on which drafters are evaluated; their documents are left out.
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
