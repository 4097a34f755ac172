"""The tokens that a head learns to draft: the most frequent ones of the target's own text."""

from collections.abc import Sequence

from torch import Tensor

from yggdrasil.drafters.heads.draft_vocabulary import DRAFT_VOCABULARY, Text, Vocabulary
from yggdrasil.training.windows import Window


def draft_vocabulary(windows: Sequence[Window], vocab_size: int, most: int = DRAFT_VOCABULARY) -> Tensor:
    """The target's tokens that are drafted [draft vocabulary] int64, ascending: all of a vocabulary that is small."""
    return Vocabulary.of(map(_text, windows), vocab_size, most).tokens


def coverage(windows: Sequence[Window], vocabulary: Tensor) -> float:
    """The share of answers' tokens that can be drafted: what agreement cannot exceed."""
    return Vocabulary(vocabulary).coverage(map(_text, windows))


def _text(window: Window) -> Text:
    answer = window.start + window.answer
    return window.tokens[:answer], window.tokens[answer:]
