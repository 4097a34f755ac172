"""Selects a head's draft vocabulary: the most frequent tokens of the target's own text."""

from collections.abc import Sequence

from torch import Tensor

from yggdrasil.drafters.heads.draft_vocabulary import DRAFT_VOCABULARY, Text, Vocabulary
from yggdrasil.training.windows import Window


def draft_vocabulary(windows: Sequence[Window], vocab_size: int, most: int = DRAFT_VOCABULARY) -> Tensor:
    """Return the ids of the ``most`` most frequent tokens of the training text, [Vd] int64 ascending.

    A prompt's token counts a quarter of an answer's. Among equals, smaller ids come first.
    If ``vocab_size`` is at most ``most``, all tokens are returned.
    """
    return Vocabulary.of(map(_text, windows), vocab_size, most).tokens


def coverage(windows: Sequence[Window], vocabulary: Tensor) -> float:
    """Return the share of the answers' tokens that are in ``vocabulary`` [Vd], 0 to 1, an upper bound of agreement."""
    return Vocabulary(vocabulary).coverage(map(_text, windows))


def _text(window: Window) -> Text:
    answer = window.start + window.answer
    return window.tokens[:answer], window.tokens[answer:]
